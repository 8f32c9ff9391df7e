# Two images with samestep. `train`, the last stage and thus the default, is lean and does not run as root. `develop` has
# the packages that the tests use and runs as root, as the tests of disks, hosts and Slurm need it (.devcontainer).
#
#   CPU:      docker build -t samestep --build-arg PIP_EXTRA_INDEX_URL=URL .  (URL of the CPU builds: see pytorch.org)
#   GPU:      docker build -t samestep --build-arg BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime .
#   run:      docker run --rm --user "$(id -u)" -v "$PWD:/work" samestep launch --nproc-per-node 2 train.py
#   develop:  docker build -t samestep-develop --target develop .
ARG BASE=python:3.11-slim

FROM ${BASE} AS develop
COPY .ci/packages /opt/packages
RUN /opt/packages
WORKDIR /work

FROM ${BASE} AS train
ARG PIP_EXTRA_INDEX_URL=
ARG EXTRAS=recipes,tensorboard,remote
# The packages that samestep needs, in a layer that a change of samestep itself leaves as it is.
COPY pyproject.toml README.md LICENSE /opt/samestep/
COPY src/samestep/__init__.py src/samestep/version.py /opt/samestep/src/samestep/
RUN pip install --no-cache-dir "/opt/samestep[${EXTRAS}]"
COPY src /opt/samestep/src
RUN pip install --no-cache-dir --no-deps --force-reinstall /opt/samestep
# For users that `docker run --user` gives without a home: torch keeps its cache under these.
ENV HOME=/tmp USER=samestep
RUN mkdir --mode=777 /work
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["samestep"]
