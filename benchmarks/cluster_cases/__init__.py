"""Training steps of several processes, in ordinary PyTorch: `CASES` names them.

small_transformer  the model, and the parts of a step that most cases share
fsdp_steps         FSDP2 and HSDP
parallel_steps     DistributedDataParallel, tensor, sequence and loss parallelism, with FSDP2 too
context_steps      context parallelism
processor_rings    attention of processors that torch can divide along the sequence
pipeline_steps     pipelines
larger_models      a transformers model, mixtures of experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trainfit

from . import context_steps as context
from . import fsdp_steps as fsdp
from . import larger_models as larger
from . import parallel_steps as parallel
from . import pipeline_steps as pipeline


@dataclass(frozen=True)
class ClusterCase:
    """A step, and how many ranks it can run on."""

    build: Callable[[], trainfit.Step]
    ranks: tuple[int, ...] = (2, 4)
    plans: bool = False
    """Whether plans are made for it and applied, too."""
    plan_per_rank: bool = False
    """Whether every rank has a plan of its own, because they are stages of a pipeline; else all have that of
    the first."""
    around_units: bool = False
    """Whether plans have only such regions as lie around units of FSDP: a planner that is free to choose
    mostly takes those inside."""


CASES: dict[str, ClusterCase] = {
    "fsdp": ClusterCase(fsdp.plain, plans=True),
    "fsdp-nccl-by-name": ClusterCase(fsdp.nccl_by_name, (2,)),
    "fsdp-no-reshard": ClusterCase(fsdp.kept_after_forward, plans=True),
    "fsdp-smaller-group": ClusterCase(fsdp.smaller_group_after_forward, (4,)),
    "fsdp-root-only": ClusterCase(fsdp.root_only, plans=True),
    "fsdp-bf16": ClusterCase(fsdp.bf16, plans=True),
    "fsdp-bf16-reduce-fp32": ClusterCase(fsdp.bf16_reduced_in_fp32, plans=True),
    "fsdp-uneven": ClusterCase(fsdp.uneven),
    "fsdp-uneven-blocks": ClusterCase(fsdp.uneven_blocks, plans=True),
    "fsdp-prefetch": ClusterCase(fsdp.prefetched, plans=True),
    "fsdp-accumulate": ClusterCase(fsdp.accumulated_in_sync),
    "fsdp-accumulate-no-sync": ClusterCase(fsdp.accumulated_without_sync, plans=True),
    "fsdp-clip": ClusterCase(fsdp.clipped, plans=True),
    "fsdp-checkpoint-inside": ClusterCase(fsdp.checkpoint_inside),
    "fsdp-checkpoint-around": ClusterCase(fsdp.checkpoint_around),
    "fsdp-checkpoint-pairs": ClusterCase(fsdp.checkpoint_around_pairs),
    "fsdp-stages": ClusterCase(fsdp.stages, plans=True, around_units=True),
    "fsdp-stages-no-reshard": ClusterCase(fsdp.stages_kept_after_forward, plans=True, around_units=True),
    "fsdp-stages-smaller-group": ClusterCase(
        fsdp.stages_in_smaller_groups_after_forward, (4,), plans=True, around_units=True
    ),
    "fsdp-stages-bf16": ClusterCase(fsdp.stages_bf16, (2,), plans=True, around_units=True),
    "fsdp-stages-any-region": ClusterCase(fsdp.stages, (2,), plans=True),
    "fsdp-units-in-units": ClusterCase(fsdp.units_in_units, plans=True, around_units=True),
    "fsdp-foreach": ClusterCase(fsdp.foreach_adamw),
    "fsdp-fused": ClusterCase(fsdp.fused_adamw),
    "fsdp-loop-sgd": ClusterCase(fsdp.loop_sgd),
    "fsdp-offload": ClusterCase(fsdp.offloaded),
    "fsdp-meta": ClusterCase(fsdp.on_meta_first),
    "fsdp-frozen": ClusterCase(fsdp.frozen_parts),
    "fsdp-tied": ClusterCase(fsdp.tied_embeddings),
    "hsdp": ClusterCase(fsdp.hsdp, plans=True),
    "hsdp-pairs": ClusterCase(fsdp.hsdp_replicated_pairs),
    "hsdp-bf16-reduce-fp32": ClusterCase(fsdp.hsdp_bf16_reduced_in_fp32),
    "ddp": ClusterCase(parallel.ddp, plans=True),
    "ddp-bucket-views": ClusterCase(parallel.ddp_bucket_views),
    "ddp-small-buckets": ClusterCase(parallel.ddp_small_buckets),
    "ddp-no-sync": ClusterCase(parallel.ddp_no_sync),
    "ddp-static-graph": ClusterCase(parallel.ddp_static_graph),
    "ddp-find-unused": ClusterCase(parallel.ddp_find_unused),
    "ddp-fp16-hook": ClusterCase(parallel.ddp_fp16_hook),
    "ddp-power-sgd": ClusterCase(parallel.ddp_power_sgd),
    "zero-optimizer": ClusterCase(parallel.zero_optimizer),
    "fsdp-of-old": ClusterCase(parallel.fsdp_of_old),
    "tp": ClusterCase(parallel.tensor_parallel, plans=True),
    "sequence-parallel": ClusterCase(parallel.sequence_parallel, plans=True),
    "loss-parallel": ClusterCase(parallel.loss_parallel_step, plans=True),
    "tp-fsdp": ClusterCase(parallel.tensor_parallel_and_fsdp, (4,), plans=True),
    "pipeline-gpipe": ClusterCase(pipeline.gpipe, plans=True, plan_per_rank=True),
    "pipeline-1f1b": ClusterCase(pipeline.one_forward_one_backward, plans=True, plan_per_rank=True),
    "pipeline-interleaved": ClusterCase(pipeline.interleaved, plans=True, plan_per_rank=True),
    "pipeline-looped-bfs": ClusterCase(pipeline.looped_bfs),
    "pipeline-zero-bubble": ClusterCase(pipeline.zero_bubble),
    "pipeline-zero-bubble-v": ClusterCase(pipeline.zero_bubble_there_and_back),
    "context-gathered": ClusterCase(context.gathered),
    "context-ring": ClusterCase(context.around_the_ring),
    "context-fsdp": ClusterCase(context.with_fsdp),
    "hf-llama-fsdp": ClusterCase(larger.hf_llama, plans=True),
    "experts": ClusterCase(larger.experts_parallel, plans=True),
    "experts-fsdp": ClusterCase(larger.experts_parallel_and_fsdp, (4,), plans=True),
}
