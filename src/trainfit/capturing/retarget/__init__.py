"""Retargeting: a capture on CPU tensors records what the target GPU would run.

`gpu.py` is the simulated GPU, with what `torch.cuda` answers for it; `streams.py` has its
streams and events. `device.py` lets tensors claim
to be on it, so that user code and optimizers choose what they would choose there. `kernels.py` and
`attention.py` replace the few operators that pick another kernel on a GPU.
`jagged.py` does the same for jagged tensors, `distributed_tensors.py` for distributed ones. `storages.py`
moves storages and what `torch.load` reads.
`autocast.py` casts by the GPU's lists. `parallel.py` runs `DataParallel` on one GPU. `libraries.py` tells
libraries that remember the device. Each rule is in one place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainfit.capturing.dispatch import CaptureMode
from trainfit.capturing.retarget.attention import EFFICIENT, efficient_rows_on
from trainfit.capturing.retarget.autocast import gpu_autocast
from trainfit.capturing.retarget.device import looks_like_cuda
from trainfit.capturing.retarget.gpu import Gpu
from trainfit.capturing.retarget.jagged import jagged_attention_on
from trainfit.capturing.retarget.kernels import gpu_kernels
from trainfit.capturing.retarget.parallel import one_gpu_in_parallel
from trainfit.capturing.retarget.storages import moving_storages


@contextlib.contextmanager
def retargeted_to(gpu: Gpu, mode: CaptureMode) -> Iterator[None]:
    """Make ordinary code behave, on CPU tensors, as it does on a GPU."""
    mode.handlers = {**mode.handlers, EFFICIENT: efficient_rows_on(gpu)}
    with (
        gpu_kernels(gpu),
        gpu_autocast(),
        moving_storages(mode),
        one_gpu_in_parallel(),
        jagged_attention_on(gpu),
        looks_like_cuda(mode, gpu),
    ):
        yield
