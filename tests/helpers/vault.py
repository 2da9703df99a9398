"""The device `vault` (vault.cpp): tensors whose memory is out of the processor's reach, as a GPU's is."""

from __future__ import annotations

import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo, Store, Work

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("g++")


def build(folder: Path) -> Path:
    """Compiles the device; its library, for `load`."""
    # Wants setuptools, which not every release of torch brings.
    from torch.utils import cpp_extension

    library = folder / "libvault.so"
    include = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    paths = cpp_extension.library_paths()
    link = [flag for path in paths for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", abi, *include, str(SOURCE), *link, "-lc10", "-ltorch_cpu"]
    subprocess.run([str(COMPILER), *flags, "-o", str(library)], check=True)
    return library


def load(library: Path) -> None:
    """Makes the device known to this process, as `vault`, and a process group's backend for its tensors."""
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    torch.utils.rename_privateuse1_backend("vault")
    module = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module("vault", module)  # type: ignore[arg-type]
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("vault", ByGloo, devices=["vault"])


class ByGloo(Backend):
    """What DistributedDataParallel asks of a process group for its parameters, by Gloo on copies."""

    def __init__(self, store: Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        # Its stub lacks the collectives.
        self._gloo: Any = ProcessGroupGloo(PrefixStore("vault/", store), rank, size, timeout=timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """`vault`."""
        return "vault"

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        """The root's."""
        copies = [tensor.cpu() for tensor in tensors]
        work: Work = self._gloo.broadcast(copies, options)
        work.wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return work

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Work:
        """Everybody's."""
        copies = [[tensor.cpu() for tensor in row] for row in outputs]
        work: Work = self._gloo.allgather(copies, [tensor.cpu() for tensor in inputs], options)
        work.wait()
        for row, copied in zip(outputs, copies, strict=True):
            for tensor, copy in zip(row, copied, strict=True):
                tensor.copy_(copy)
        return work
