"""Workspaces of convolutions on a GPU: what cuDNN's kernels ask for, by the algorithm that it likely chooses.

cuDNN chooses an algorithm per call, by heuristics that it does not publish or by trying all. For each of
the three products (forward, gradient of the images, of the weights) there is a likely figure and a bound:

- Tensor cores (16-bit dtypes; float32 where TF32 is allowed, from Ampere on) work on channels-last images
  with channels in whole vectors of 16 bytes. Others are rewritten first, into copies.
- Without them, 3x3 filters that move one by one are done with Winograd's algorithm. In one kernel it keeps
  the transformed filters, 4x4 each. There is no such kernel for the gradient of the weights: that one writes
  out the tiles of 6x6 in which it covers images and results by 4x4, and the filters likewise.
- The gradient of the weights sums over all positions of all images. To keep the chip busy, these are divided,
  and each part has its own float32 sums.
- Everything else is an implicit product, which keeps nothing.

The bound is the largest of all algorithms that apply: Fourier transforms in tiles of 32x32, Winograd with
written tiles, the images written out as a matrix. When a kernel finds no memory, torch takes the next one, so
that a step whose likely figures fit does run. Depthwise convolutions have kernels of their own without any.

Sources: NVIDIA's documentation of cudnnConvolutionFwdAlgo_t, ...BwdDataAlgo_t and ...BwdFilterAlgo_t; Lavin
and Gray 2015; torch's `aten/src/ATen/native/cudnn/Conv_v8.cpp` and `ConvShared.cpp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trainfit.devices.architectures import FLASH_CAPABILITY, capability_of, is_amd
from trainfit.devices.device_table import Device
from trainfit.operators.recorded_calls import ITEM_BYTES, RecordedArguments, nbytes
from trainfit.traces.trace import Signature, TensorSpec
from trainfit.workspace.kernel_workspace import KernelWorkspace, most_of

_TENSOR_CORES = (7, 0)
_VECTOR_BYTES = 16
_TILE = 128
"""Rows and columns of a product that one thread block computes."""
_LEAST_DEPTH = 256
"""Positions that a thread block sums at least, when sums are divided among blocks."""
_WINOGRAD_FILTER = 3
_FUSED_TILE, _WRITTEN_TILE, _WRITTEN_STEP = 16, 36, 4
"""Values per transformed filter in one kernel, per transformed tile where tiles are written, and how many
results such a tile makes in each direction."""
_FOURIER_SIDE = 32
_FOURIER_VALUES = _FOURIER_SIDE * (_FOURIER_SIDE // 2 + 1)
"""Complex values of a transformed tile of real ones: one half, by symmetry."""


@dataclass(frozen=True, slots=True)
class _ConvolutionCall:
    """An ordinary convolution of `images` to `results`; transposed ones are its gradient."""

    images: TensorSpec
    weight: TensorSpec
    results: TensorSpec
    groups: int
    steps: tuple[int, ...]
    dilation: tuple[int, ...]
    channels_last: bool

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES.get(self.weight.dtype, 1)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.images.shape[1]

    @property
    def dense(self) -> bool:
        """Whether the filter moves one by one over neighbouring pixels, and sees all channels."""
        return self.groups == 1 and set(self.steps) == {1} == set(self.dilation)

    @property
    def winograd(self) -> bool:
        filters = self.weight.shape[2:]
        return self.dense and filters == (_WINOGRAD_FILTER,) * 2

    @property
    def pairs(self) -> int:
        """Channels in times channels out."""
        return self.weight.shape[0] * self.weight.shape[1]


def convolution_workspace(signature: Signature, device: Device, tf32: bool) -> KernelWorkspace:
    """Return the workspace of `aten.convolution`."""
    call = RecordedArguments(signature)
    images, weight = call.tensor(0), call.tensor(1)
    if images is None or weight is None or not signature.outputs or not all(images.shape):
        return KernelWorkspace(0, 0)
    found = _convolution(call, images, weight, signature.outputs[0], device, first=3)
    transposed = bool(call.get(6, "transposed", False))
    if transposed:
        found = replace(found, images=found.results, results=found.images)
    work = _image_gradient(found, device, tf32) if transposed else _forward(found, device, tf32)
    return work.plus(_rewritten(found.channels_last, images, weight))


def convolution_backward_workspace(signature: Signature, device: Device, tf32: bool) -> KernelWorkspace:
    """Return the workspace of `aten.convolution_backward`: one gradient is computed after the other."""
    call = RecordedArguments(signature)
    gradient, images, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    if gradient is None or images is None or weight is None or not all(images.shape):
        return KernelWorkspace(0, 0)
    found = _convolution(call, images, weight, gradient, device, first=4)
    transposed = bool(call.get(7, "transposed", False))
    if transposed:
        found = replace(found, images=found.results, results=found.images)
    wanted = call.get(10, "output_mask", [True, True, True])
    parts = []
    if wanted[0]:
        part = _forward(found, device, tf32) if transposed else _image_gradient(found, device, tf32)
        parts.append(part.plus(_rewritten(found.channels_last, weight)))
    if wanted[1]:
        part = _weight_gradient(found, device, tf32)
        parts.append(part.plus(_rewritten(found.channels_last, images)))
    return most_of(parts).plus(_rewritten(found.channels_last, gradient))


def _convolution(
    call: RecordedArguments,
    images: TensorSpec,
    weight: TensorSpec,
    results: TensorSpec,
    device: Device,
    first: int,
) -> _ConvolutionCall:
    """Read the arguments; `first` is where the strides stand, which padding and dilation follow."""
    dims = len(weight.shape) - 2
    steps, dilation = (_each(call.get(first + at, name, 1), dims) for at, name in _NAMES)
    groups = int(call.get(first + 5, "groups", 1))
    # Before AMD's library torch makes all of them contiguous.
    last = not is_amd(device.architecture) and any(map(_is_channels_last, (images, weight)))
    return _ConvolutionCall(images, weight, results, groups, steps, dilation, last)


_NAMES = ((0, "stride"), (2, "dilation"))


def _each(given: int | list[int], dims: int) -> tuple[int, ...]:
    values = given if isinstance(given, list) else [given]
    return tuple(values if len(values) == dims else values * dims)


# ----------------------------------------------------------------------------------- what torch copies itself


def _is_channels_last(spec: TensorSpec) -> bool:
    """Whether channels lie closest together; a single channel or pixel says nothing."""
    if len(spec.shape) < 4 or len(spec.stride) != len(spec.shape):
        return False
    return spec.stride[1] == 1 and spec.shape[1] > 1 and math.prod(spec.shape[2:]) > 1


def _rewritten(channels_last: bool, *specs: TensorSpec) -> int:
    """Return the bytes of tensors that torch itself brings into the layout of the others."""
    otherwise = [spec for spec in specs if _lies_otherwise(spec, channels_last)]
    return sum(math.prod(spec.shape) * ITEM_BYTES.get(spec.dtype, 1) for spec in otherwise)


def _lies_otherwise(spec: TensorSpec, channels_last: bool) -> bool:
    if len(spec.stride) != len(spec.shape):
        return False
    order = [0, *range(2, len(spec.shape)), 1] if channels_last else [*range(len(spec.shape))]
    expected = 1
    for dimension in reversed(order):
        if spec.shape[dimension] != 1 and spec.stride[dimension] != expected:
            return True
        expected *= spec.shape[dimension]
    return False


# ---------------------------------------------------------------------------------------------- likely, bound


def _forward(found: _ConvolutionCall, device: Device, tf32: bool) -> KernelWorkspace:
    if found.depthwise or is_amd(device.architecture):
        return KernelWorkspace(0, 0 if found.depthwise else _largest(found))
    if _on_tensor_cores(found, device, tf32):
        likely = _padded(found, found.images, found.results)
    else:
        likely = _FUSED_TILE * 4 * found.pairs if found.winograd else 0
    return KernelWorkspace(likely, max(likely, _largest(found)))


def _image_gradient(found: _ConvolutionCall, device: Device, tf32: bool) -> KernelWorkspace:
    """Like forward with images and results exchanged: the same products of the same shapes."""
    return _forward(found, device, tf32)


def _weight_gradient(found: _ConvolutionCall, device: Device, tf32: bool) -> KernelWorkspace:
    if found.depthwise or is_amd(device.architecture):
        return KernelWorkspace(0, 0 if found.depthwise else _largest(found))
    likely = _partial_sums(found, device)
    if _on_tensor_cores(found, device, tf32):
        likely += _padded(found, found.images, found.results)
    elif found.winograd:
        likely = _written_tiles(found)
    return KernelWorkspace(likely, max(likely, _largest(found)))


def _on_tensor_cores(found: _ConvolutionCall, device: Device, tf32: bool) -> bool:
    capability = capability_of(device.architecture) or FLASH_CAPABILITY
    if found.weight.dtype == "float32":
        return tf32 and capability >= FLASH_CAPABILITY
    return found.item_bytes == 2 and capability >= _TENSOR_CORES


def _padded(found: _ConvolutionCall, *specs: TensorSpec) -> int:
    """Return the bytes of copies for tensor cores: channels last, in whole vectors."""
    vector = _VECTOR_BYTES // found.item_bytes
    total = 0
    for spec in specs:
        channels = spec.shape[1]
        whole = -(-channels // vector) * vector
        if not found.channels_last or whole != channels:
            total += spec.shape[0] * math.prod(spec.shape[2:]) * whole * found.item_bytes
    return total


def _partial_sums(found: _ConvolutionCall, device: Device) -> int:
    """Return the bytes of float32 sums of parts: as many parts as fill the chip once, or none."""
    rows, columns = found.weight.shape[0] // found.groups, math.prod(found.weight.shape[1:])
    blocks = found.groups * -(-rows // _TILE) * -(-columns // _TILE)
    positions = found.results.shape[0] * math.prod(found.results.shape[2:])
    parts = min((device.sm_count or 1) // blocks, positions // _LEAST_DEPTH)
    return parts * math.prod(found.weight.shape) * 4 if parts > 1 else 0


def _written_tiles(found: _ConvolutionCall) -> int:
    """Return the bytes of Winograd's tiles where they are written: of images, results and filters."""
    size = found.results.shape[2:]
    tiles = found.results.shape[0] * math.prod(-(-length // _WRITTEN_STEP) for length in size)
    outputs, inputs = found.weight.shape[:2]
    return 4 * _WRITTEN_TILE * (tiles * (inputs + outputs) + inputs * outputs)


def _largest(found: _ConvolutionCall) -> int:
    """Return the bytes of the largest algorithm that applies."""
    taps = math.prod(found.weight.shape[1:]) * found.groups
    positions = found.results.shape[0] * math.prod(found.results.shape[2:])
    candidates = [positions * taps * found.item_bytes]  # the images as a matrix
    candidates.append(sum(map(nbytes, (found.images, found.results, found.weight))))  # another layout
    flat = len(found.weight.shape) == 4
    if found.winograd:
        candidates.append(_written_tiles(found))
    if found.dense and flat and max(found.weight.shape[2:]) < _FOURIER_SIDE:
        useful = [_FOURIER_SIDE - length + 1 for length in found.weight.shape[2:]]
        over = math.prod(-(-length // step) for length, step in zip(found.results.shape[2:], useful))
        outputs, inputs = found.weight.shape[:2]
        transforms = found.images.shape[0] * over * (inputs + outputs) + inputs * outputs
        candidates.append(8 * _FOURIER_VALUES * transforms)
    return max(candidates)
