"""Errors that a step raises only because it is captured: they are ours, and say so."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from trainfit.basics.user_errors import raise_as_user_error
from trainfit.capturing.values import user_line_of
from trainfit.errors import CaptureError, UserCodeError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_TORCH_FOLDER = str(Path(torch.__file__).parent)


def user_code(session: Session, function: Callable[[], Any], doing: str) -> Any:
    """Call a function of the user's; what it raises becomes one of our errors, with what was being done."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        ours = explained(session, error)
        if ours is not None:
            raise ours from error
        try:
            raise_as_user_error(error, doing)
        except UserCodeError as theirs:
            raise with_assumption(session, theirs) from error


def explained(session: Session, error: BaseException) -> CaptureError | None:
    """Return what to say instead of an error that a real run would not raise; None if it would.

    Errors that another one was made of count as well: a target wraps those of the user's function, and torch
    those of a pipeline's stage.
    """
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    # The first that was raised knows the user's line; those made of it may repeat its words.
    for one in reversed(chain):
        found = one if isinstance(one, CaptureError) and one is not error else _explained(session, one)
        if found is not None:
            return found
    return None


def _explained(session: Session, error: BaseException) -> CaptureError | None:
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return CaptureError(
            f"{user_line_of(error)} asks for values that only a real run has ({error}); "
            "capture cannot follow it."
        )
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | os.PathLike):
        path = os.path.abspath(error.filename)
        if path in session.disk.files:
            return CaptureError(session.disk.refusal(path, user_line_of(error)))
    if session.device == "cuda" and any(sign in str(error) for sign in _NO_GPU):
        return CaptureError(
            f"{user_line_of(error)} calls {_last_call(error)}, which trainfit's stand-in for a GPU does not "
            f"cover ({_one_line(error)}). This is a limit of the capture, not a mistake in the step."
        )
    if session.device == "cpu" and _NO_CUDA in str(error):
        return CaptureError(
            f"{user_line_of(error)} asks for a GPU, and the step is captured for the CPU. Name a GPU, as in "
            "--device h100 (in Python device='h100'), or give the function that builds the step a parameter "
            "named device, which gets 'cpu' here."
        )
    if _CPU_ATTENTION in str(error) and "sharding strategy" in str(error):
        return CaptureError(
            f"{user_line_of(error)} calls attention on distributed tensors, as context parallelism does. "
            "torch has a way to divide it for GPUs only, and raises on a CPU, too "
            f"({_one_line(error)}): name a GPU, as in --device h100."
        )
    if _MIXED in str(error) and any("_context_parallel" in frame for frame in _files(error)):
        return CaptureError(
            f"{user_line_of(error)} calls attention for which the GPU has no fused kernel (in float32 with "
            "fewer heads of keys than of queries, with a mask, or in bfloat16 on an older GPU). torch runs a "
            f"formula in its place, which context parallelism cannot divide ({_one_line(error)}): use "
            "bfloat16 or float16, and no mask."
        )
    if _DISTRIBUTED_REDUCER in str(error):
        return CaptureError(
            f"{user_line_of(error)} makes a DistributedDataParallel: say how many processes there are, with "
            "--world-size N or in Python with cluster=trainfit.Cluster(N)."
        )
    return None


def with_assumption(session: Session, error: UserCodeError) -> UserCodeError:
    """Return an error of the user's code with the assumptions before it, which may have caused it."""
    assumed = [str(one) for one in session.values.assumptions if one.kind == "data"]
    if not assumed:
        return error
    message = (
        f"{str(error).rstrip('.')}. This may come from what was assumed, and not happen in a real run: "
        f"{assumed[-1]}. Capture cannot follow a step whose shapes rest on values that only a real run has."
    )
    return UserCodeError(message, error.user_traceback)


_NO_CLASS = "Tried to instantiate dummy base class"
_NO_CUDA = "Torch not compiled with CUDA enabled"
_MIXED = "got mixed torch.Tensor and DTensor"
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_DISTRIBUTED_REDUCER = "DDP expects same model across all ranks"
# What torch raises without a GPU; on a GPU the step would not see this error.
_NO_GPU = (
    _NO_CUDA,
    "Cannot access accelerator device",
    "hasPrimaryContext",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "Storage device not recognized: cuda",
    "backend 'CUDA'",
    "'CUDA' backend",
    "CUDAHooks",
    "PyTorch was compiled without CUDA",
    "module 'torch._C' has no attribute",
    "device type CUDA",
    _NO_CLASS,
)


def _files(error: BaseException) -> list[str]:
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


def _last_call(error: BaseException) -> str:
    """Name the last function of torch that was called before the error."""
    if _NO_CLASS in str(error):
        return f"torch.cuda.{str(error).rpartition(' ')[2]}"
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [code for code in frames if code.co_filename.startswith(_TORCH_FOLDER)]
    if not found:
        return "torch"
    module = found[-1].co_filename.removeprefix(_TORCH_FOLDER).removesuffix(".py").removesuffix("/__init__")
    return f"torch{module.replace(os.sep, '.')}.{found[-1].co_qualname}"


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:160]
