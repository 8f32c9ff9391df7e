# An image with samestep, for clusters (samestep submit --k8s --image ...) and for work on samestep (.devcontainer).
#
#   CPU:  docker build -t samestep --build-arg PIP_EXTRA_INDEX_URL=URL .      (URL of the CPU builds: see pytorch.org)
#   GPU:  docker build -t samestep --build-arg BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime .
#   run:  docker run --rm -v "$PWD:/work" samestep launch --nproc-per-node 2 train.py
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL=
COPY . /opt/samestep
RUN /opt/samestep/.ci/packages
RUN pip install --no-cache-dir "/opt/samestep[all]"
WORKDIR /work
ENTRYPOINT ["samestep"]
