"""The global state of torch, NumPy and Python that every simulated process has for itself."""

import ctypes
import importlib
import random
from typing import Any

import numpy as np
import torch

_optimizers: Any = importlib.import_module("torch.optim.optimizer")
_modules: Any = importlib.import_module("torch.nn.modules.module")
_workers: Any = importlib.import_module("torch.utils.data._utils.worker")
_norm_cell: Any = torch.nn.utils.clip_grad._get_total_norm.__closure__[0]
_HOOKS = [
    (_optimizers, "_global_optimizer_pre_hooks"),
    (_optimizers, "_global_optimizer_post_hooks"),
    *((_modules, name) for name in vars(_modules) if name.startswith("_global_") and name.endswith("_hooks")),
]
# To copy its memory takes 1 us; np.random.get_state and set_state take 100. No script draws normal numbers,
# whose second half is kept elsewhere.
_NUMPY_STATE = (ctypes.c_uint32 * 625).from_address(np.random.get_bit_generator().ctypes.state_address)
_ALL = [*_HOOKS, (torch.amp.GradScaler, "_unscale_grads_"), (_workers, "_worker_info")]


class TorchGlobals:
    """The state of generators, default types and global hooks at its creation."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = bytes(_NUMPY_STATE)
        self._torch = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._norm = _norm_cell.cell_contents
        self._values = [vars(owner)[name] for owner, name in _ALL]

    def restore(self) -> None:
        """Make it the current state."""
        random.setstate(self._python)
        ctypes.memmove(_NUMPY_STATE, self._numpy, len(self._numpy))
        torch.set_rng_state(self._torch)
        torch.set_default_dtype(self._dtype)
        _norm_cell.cell_contents = self._norm
        for (owner, name), value in zip(_ALL, self._values, strict=True):
            setattr(owner, name, value)

    @classmethod
    def reset(cls) -> None:
        """Make the state of a new process the current one."""
        _NEW.restore()
        for owner, name in _HOOKS:
            setattr(owner, name, type(getattr(owner, name))())


_NEW = TorchGlobals()
