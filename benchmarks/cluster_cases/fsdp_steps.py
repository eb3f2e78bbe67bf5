"""FSDP2 and HSDP as people use them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import trainfit

from .small_transformer import Transformer, adamw, own_device, start, token_batch, token_loss, usual_step


def flat_mesh() -> DeviceMesh:
    device = start()
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def two_by(inner: int, names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    device = start()
    return init_device_mesh(device.type, (dist.get_world_size() // inner, inner), mesh_dim_names=names)


def sharded(model: Transformer, mesh: DeviceMesh, **options: Any) -> Transformer:
    """Shard block by block and the root, the usual way."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def plain() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh())
    return usual_step(model, adamw(model), token_batch())


def nccl_by_name() -> trainfit.Step:
    """Name a backend that this machine does not have."""
    device = start("nccl")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = sharded(Transformer(), mesh)
    return usual_step(model, adamw(model), token_batch())


def kept_after_forward() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh(), reshard_after_forward=False)
    return usual_step(model, adamw(model), token_batch())


def smaller_group_after_forward() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh(), reshard_after_forward=2)
    return usual_step(model, adamw(model), token_batch())


def root_only() -> trainfit.Step:
    model = fully_shard(Transformer(), mesh=flat_mesh())
    return usual_step(model, adamw(model), token_batch())


def bf16() -> trainfit.Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(Transformer(), flat_mesh(), mp_policy=policy)
    return usual_step(model, adamw(model), token_batch())


def bf16_reduced_in_fp32() -> trainfit.Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(Transformer(), flat_mesh(), mp_policy=policy)
    return usual_step(model, adamw(model), token_batch())


def uneven() -> trainfit.Step:
    """Rows that no number of ranks divides: 251 tokens, 3 rows of a bias, 63 columns."""
    mesh = flat_mesh()
    model = nn.Sequential(
        nn.Embedding(251, 63), nn.Linear(63, 97), nn.GELU(), nn.Linear(97, 3), nn.GELU(), nn.Linear(3, 251)
    )
    for layer in (model[1], model[3], model[5]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return usual_step(model, adamw(model), token_batch(vocabulary=251))


def uneven_blocks() -> trainfit.Step:
    """Blocks of 97 rows: ranks differ in what they keep, and under one plan in their peaks."""
    mesh = flat_mesh()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(97, 97), nn.GELU(), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    return trainfit.Step.of(
        model, torch.randn(512, 97), loss=lambda output: output.square().mean(), optimizer=optimizer
    )


def prefetched() -> trainfit.Step:
    model = sharded(Transformer(layers=4), flat_mesh())
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 3])
        layer.set_modules_to_backward_prefetch(layers[max(number - 2, 0) : number][::-1])
    return usual_step(model, adamw(model), token_batch())


def _accumulated(in_sync: bool) -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh())
    optimizer, tokens = adamw(model), token_batch()

    def run() -> torch.Tensor:
        total = torch.zeros((), device=tokens.device)
        for part, micro_batch in enumerate(tokens.chunk(2)):
            model.set_requires_gradient_sync(in_sync or part == 1)
            loss = token_loss(model(micro_batch), micro_batch) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def accumulated_in_sync() -> trainfit.Step:
    return _accumulated(in_sync=True)


def accumulated_without_sync() -> trainfit.Step:
    return _accumulated(in_sync=False)


def clipped() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh())
    return usual_step(
        model, adamw(model), token_batch(), lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    )


class _CheckpointedInside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpoint_inside() -> trainfit.Step:
    """The unit is around the checkpointed part: parameters are gathered once for the whole backward of it."""
    mesh, model = flat_mesh(), Transformer()
    for number, layer in enumerate(model.layers):
        model.layers[number] = _CheckpointedInside(layer)
    sharded(model, mesh)
    return usual_step(model, adamw(model), token_batch())


def checkpoint_around() -> trainfit.Step:
    """The checkpointed part is around the unit: recomputation gathers again."""
    mesh, model = flat_mesh(), Transformer()
    for number, layer in enumerate(model.layers):
        model.layers[number] = _CheckpointedInside(fully_shard(layer, mesh=mesh))
    fully_shard(model, mesh=mesh)
    return usual_step(model, adamw(model), token_batch())


def checkpoint_around_pairs() -> trainfit.Step:
    """One checkpoint is around two units: the first is gathered for recomputation, and again for backward."""
    mesh, model = flat_mesh(), Transformer(layers=4)
    units = [fully_shard(layer, mesh=mesh) for layer in model.layers]
    pairs = zip(units[::2], units[1::2])
    model.layers = nn.ModuleList(_CheckpointedInside(nn.Sequential(*pair)) for pair in pairs)
    fully_shard(model, mesh=mesh)
    return usual_step(model, adamw(model), token_batch())


def _in_stages(mesh: DeviceMesh, blocks: int = 3, **options: Any) -> trainfit.Step:
    """Return a step whose blocks lie in two stages: modules of their own, with a unit for each block."""
    model = Transformer(layers=2 * blocks)
    units = [fully_shard(layer, mesh=mesh, **options) for layer in model.layers]
    model.layers = nn.ModuleList(nn.Sequential(*stage) for stage in (units[:blocks], units[blocks:]))
    fully_shard(model, mesh=mesh)
    return usual_step(model, adamw(model), token_batch(batch=8))


def stages() -> trainfit.Step:
    return _in_stages(flat_mesh())


def stages_kept_after_forward() -> trainfit.Step:
    return _in_stages(flat_mesh(), reshard_after_forward=False)


def stages_in_smaller_groups_after_forward() -> trainfit.Step:
    return _in_stages(flat_mesh(), reshard_after_forward=2)


def stages_bf16() -> trainfit.Step:
    """Every block casts what it is given, and back."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    return _in_stages(flat_mesh(), mp_policy=policy)


def units_in_units() -> trainfit.Step:
    """A block is a unit around another one, as around experts."""
    mesh, model = flat_mesh(), Transformer(layers=3)
    for layer in model.layers:
        fully_shard(layer.feed_forward, mesh=mesh)
        fully_shard(layer.attention, mesh=mesh)
    sharded(model, mesh)
    return usual_step(model, adamw(model), token_batch(batch=8))


def foreach_adamw() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh())
    return usual_step(model, adamw(model, foreach=True), token_batch())


def fused_adamw() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh())
    return usual_step(model, adamw(model, fused=True), token_batch())


def loop_sgd() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    return usual_step(model, optimizer, token_batch())


def offloaded() -> trainfit.Step:
    model = sharded(Transformer(), flat_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return usual_step(model, adamw(model), token_batch())


def on_meta_first() -> trainfit.Step:
    """Parameters get memory only when they are sharded."""
    mesh = flat_mesh()
    with torch.device("meta"):
        model = Transformer()
    sharded(model, mesh)
    model.to_empty(device=own_device())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return usual_step(model, adamw(model), token_batch())


def frozen_parts() -> trainfit.Step:
    """Only norms and the output are trained."""
    mesh, model = flat_mesh(), Transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "output" in name)
    sharded(model, mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return usual_step(model, torch.optim.AdamW(trained, lr=1e-3), token_batch())


def tied_embeddings() -> trainfit.Step:
    mesh, model = flat_mesh(), Transformer()
    model.output.weight = model.tokens.weight
    sharded(model, mesh)
    return usual_step(model, adamw(model), token_batch())


def hsdp() -> trainfit.Step:
    model = sharded(Transformer(), two_by(2))
    return usual_step(model, adamw(model), token_batch())


def hsdp_replicated_pairs() -> trainfit.Step:
    """Two replicas, whatever the number of ranks."""
    device = start()
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(Transformer(), mesh)
    return usual_step(model, adamw(model), token_batch())


def hsdp_bf16_reduced_in_fp32() -> trainfit.Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(Transformer(), two_by(2), mp_policy=policy)
    return usual_step(model, adamw(model), token_batch())
