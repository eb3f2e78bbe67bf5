"""Hugging Face architectures, each from a small configuration with random weights.

Only sizes are set: dropout, LayerDrop, masking and attention kernels stay at the architecture's defaults.
A table below is `{model_type: sizes}` and has one function that knows the inputs of the whole family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainfit import Step

from . import Case

Build = Callable[[], Step]
Sizes = Mapping[str, Any]

SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def create(auto_class: str, model_type: str, sizes: Sizes) -> nn.Module:
    """Create a model in training mode; `auto_class` is an Auto class or the name of a model class."""
    import transformers

    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model_class = getattr(transformers, auto_class)
    model = model_class.from_config(config) if auto_class.startswith("AutoModel") else model_class(config)
    return model.train()


def training_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    optimizer: str = "adamw",
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Step:
    """Wrap a model and its keyword arguments in the usual step, with the optimizer of that name."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match optimizer:
        case "adamw":
            chosen = torch.optim.AdamW(parameters, lr=1e-4)
        case "sgd":
            chosen = torch.optim.SGD(parameters, lr=1e-3)
        case "momentum":
            chosen = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        case _:
            raise ValueError(f"no optimizer called {optimizer!r} here")
    return Step.of(model, inputs, loss=loss, optimizer=chosen)


def random_tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    """Draw token ids, none of them a special one."""
    return torch.randint(10, vocabulary, shape)


def mean_of_hidden(output: Any) -> torch.Tensor:
    """Make a scalar of the last hidden state, for models without a loss of their own."""
    return output.last_hidden_state.float().pow(2).mean()


# ------------------------------------------------------------------------------------ text, one stream


def causal_lm(
    model_type: str, batch: int = 4, sequence: int = 128, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """Next-token prediction."""

    def build() -> Step:
        model = create("AutoModelForCausalLM", model_type, {**SPECIAL_TOKENS, **sizes})
        tokens = random_tokens(sizes["vocab_size"], batch, sequence)
        return training_step(model, {"input_ids": tokens, "labels": tokens}, optimizer)

    return build


def masked_lm(
    model_type: str,
    batch: int = 4,
    sequence: int = 128,
    padded: bool = True,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """Prediction of masked tokens, with the attention mask of a padded batch."""

    def build() -> Step:
        model = create("AutoModelForMaskedLM", model_type, {**SPECIAL_TOKENS, **sizes})
        tokens = random_tokens(sizes["vocab_size"], batch, sequence)
        inputs = {"input_ids": tokens, "labels": tokens}
        if padded:
            inputs["attention_mask"] = torch.ones_like(tokens)
            inputs["attention_mask"][-1, sequence // 2 :] = 0
        return training_step(model, inputs, optimizer)

    return build


def seq2seq(
    model_type: str,
    batch: int = 4,
    sequence: int = 128,
    target: int = 64,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """An encoder reads one text, a decoder writes another."""

    def build() -> Step:
        tokens = {**SPECIAL_TOKENS, "decoder_start_token_id": 1}
        model = create("AutoModelForSeq2SeqLM", model_type, {**tokens, **sizes})
        inputs = {
            "input_ids": random_tokens(sizes["vocab_size"], batch, sequence),
            "labels": random_tokens(sizes["vocab_size"], batch, target),
        }
        return training_step(model, inputs, optimizer)

    return build


def text_classifier(
    model_type: str,
    batch: int = 4,
    sequence: int = 128,
    vocabulary: int = 500,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """One label for each text."""

    def build() -> Step:
        model = create("AutoModelForSequenceClassification", model_type, {**sizes, "num_labels": 10})
        tokens = random_tokens(vocabulary, batch, sequence)
        inputs = {"input_ids": tokens, "labels": torch.randint(0, 10, (batch,))}
        return training_step(model, inputs, optimizer)

    return build


# ---------------------------------------------------------------------------------------------- tables

LLAMA_LIKE = {
    "vocab_size": 500,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2_LIKE = {"vocab_size": 500, "n_embd": 192, "n_layer": 3, "n_head": 4}
BERT_LIKE = {
    "vocab_size": 500,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
BART_LIKE = {
    "vocab_size": 500,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "decoder_ffn_dim": 384,
}
T5_LIKE = {"vocab_size": 500, "d_model": 128, "d_kv": 32, "d_ff": 384, "num_layers": 2, "num_heads": 4}

DENSE_DECODERS: dict[str, Sizes] = {
    "gpt2": GPT2_LIKE,
    "llama": LLAMA_LIKE,
    "mistral": {**LLAMA_LIKE, "sliding_window": 64},
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 48},
    "gemma": {**LLAMA_LIKE, "head_dim": 48, "optimizer": "momentum"},
    "gemma2": {**LLAMA_LIKE, "head_dim": 48, "sliding_window": 64},
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 48, "sliding_window": 64},
    "phi": {**LLAMA_LIKE, "optimizer": "sgd"},
    "phi3": LLAMA_LIKE,
    "opt": {**BERT_LIKE, "ffn_dim": 512, "word_embed_proj_dim": 192},
    "bloom": {"vocab_size": 500, "hidden_size": 192, "n_layer": 3, "n_head": 4},
    "falcon": {"vocab_size": 500, "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gpt_neox": BERT_LIKE,
    "gptj": {**GPT2_LIKE, "rotary_dim": 16, "optimizer": "momentum"},
    "gpt_neo": {
        "vocab_size": 500,
        "hidden_size": 192,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 64,
    },
    "codegen": {**GPT2_LIKE, "rotary_dim": 16},
    "mpt": {"vocab_size": 500, "d_model": 192, "n_layers": 3, "n_heads": 4},
    "stablelm": LLAMA_LIKE,
    "starcoder2": LLAMA_LIKE,
    "olmo": LLAMA_LIKE,
    "olmo2": {**LLAMA_LIKE, "optimizer": "sgd"},
    "cohere": LLAMA_LIKE,
    "granite": LLAMA_LIKE,
    "smollm3": LLAMA_LIKE,
    "glm": {**LLAMA_LIKE, "head_dim": 48},
    "glm4": {**LLAMA_LIKE, "head_dim": 48},
    "xglm": {"vocab_size": 500, "d_model": 192, "num_layers": 3, "attention_heads": 4, "ffn_dim": 512},
    "gpt_bigcode": GPT2_LIKE,
    "biogpt": BERT_LIKE,
    "nemotron": {**LLAMA_LIKE, "head_dim": 48},
    "persimmon": BERT_LIKE,
    "openai-gpt": GPT2_LIKE,
    "ctrl": {"vocab_size": 500, "n_embd": 192, "n_layer": 3, "n_head": 4, "dff": 512},
    "diffllama": LLAMA_LIKE,
    "helium": {**LLAMA_LIKE, "head_dim": 48},
    "cohere2": {**LLAMA_LIKE, "sliding_window": 64},
    "olmo3": {**LLAMA_LIKE, "sliding_window": 64},
    "arcee": LLAMA_LIKE,
    "exaone4": {**LLAMA_LIKE, "sliding_window": 64},
}

SMALL_MOE = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEEPSEEK_LIKE = {
    **SMALL_MOE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

MOE_DECODERS: dict[str, Sizes] = {
    "mixtral": {**SMALL_MOE, "num_local_experts": 4},
    "qwen2_moe": {
        **SMALL_MOE,
        "num_experts": 8,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_moe": {**SMALL_MOE, "num_experts": 8, "moe_intermediate_size": 128, "num_experts_per_tok": 2},
    "olmoe": {**SMALL_MOE, "num_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {**SMALL_MOE, "num_local_experts": 4},
    "granitemoe": {**SMALL_MOE, "num_local_experts": 8},
    "deepseek_v2": {**DEEPSEEK_LIKE, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**DEEPSEEK_LIKE, "n_group": 2, "topk_group": 1},
    "gpt_oss": {**SMALL_MOE, "num_local_experts": 8, "head_dim": 32, "sliding_window": 64},
    "jetmoe": {**SMALL_MOE, "num_local_experts": 4, "kv_channels": 32},
    "ernie4_5_moe": {**SMALL_MOE, "moe_num_experts": 8, "moe_intermediate_size": 128, "moe_k": 2},
    "dots1": {
        **SMALL_MOE,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        **SMALL_MOE,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
}

ENCODERS: dict[str, Sizes] = {
    "bert": BERT_LIKE,
    "roberta": BERT_LIKE,
    "distilbert": {"vocab_size": 500, "dim": 192, "n_layers": 3, "n_heads": 4, "hidden_dim": 512},
    "albert": {**BERT_LIKE, "embedding_size": 64, "num_hidden_layers": 4},
    "electra": {**BERT_LIKE, "embedding_size": 64},
    "deberta": {**BERT_LIKE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        **BERT_LIKE,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 32,
    },
    "mpnet": BERT_LIKE,
    "modernbert": {
        **BERT_LIKE,
        "local_attention": 32,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "num_hidden_layers": 4,
    },
    "longformer": {**BERT_LIKE, "attention_window": 32, "sequence": 128, "batch": 2},
    "big_bird": {**BERT_LIKE, "hidden_size": 128, "block_size": 16, "sequence": 256, "batch": 2},
    "funnel": {
        "vocab_size": 500,
        "d_model": 128,
        "n_head": 4,
        "d_head": 32,
        "d_inner": 384,
        "block_sizes": [2, 2],
    },
    "roformer": {**BERT_LIKE, "embedding_size": 192},
    "nystromformer": {**BERT_LIKE, "num_landmarks": 16, "segment_means_seq_len": 128, "padded": False},
    "camembert": BERT_LIKE,
    "convbert": {**BERT_LIKE, "embedding_size": 64},
    "ernie": BERT_LIKE,
    "esm": {**BERT_LIKE, "position_embedding_type": "rotary", "mask_token_id": 5},
    "fnet": {"vocab_size": 500, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3},
    "mobilebert": {
        **BERT_LIKE,
        "embedding_size": 64,
        "hidden_size": 128,
        "intra_bottleneck_size": 64,
        "true_hidden_size": 64,
    },
    "rembert": {**BERT_LIKE, "input_embedding_size": 64, "output_embedding_size": 96},
    "squeezebert": {**BERT_LIKE, "embedding_size": 192},
    "xlm": {"vocab_size": 500, "emb_dim": 192, "n_layers": 3, "n_heads": 4},
    "ibert": BERT_LIKE,
    "yoso": BERT_LIKE,
    "eurobert": BERT_LIKE,
}

TEXT_CLASSIFIERS: dict[str, Sizes] = {
    "xlnet": {"vocab_size": 500, "d_model": 192, "n_layer": 3, "n_head": 4, "d_inner": 512},
    "canine": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "num_hash_buckets": 1024,
        "local_transformer_stride": 64,
        "sequence": 256,
    },
    "perceiver": {
        "vocabulary": 262,
        "d_model": 128,
        "d_latents": 192,
        "num_latents": 64,
        "num_self_attends_per_block": 4,
        "max_position_embeddings": 512,
        "sequence": 512,
    },
    "layoutlm": {**BERT_LIKE, "max_2d_position_embeddings": 128},
    "megatron-bert": BERT_LIKE,
    "roberta-prelayernorm": BERT_LIKE,
}

ENCODER_DECODERS: dict[str, Sizes] = {
    "t5": T5_LIKE,
    "mt5": T5_LIKE,
    "umt5": T5_LIKE,
    "longt5": {**T5_LIKE, "local_radius": 31},
    "bart": BART_LIKE,
    "pegasus": BART_LIKE,
    "marian": BART_LIKE,
    "mbart": BART_LIKE,
    "led": {**BART_LIKE, "attention_window": 32},
    "m2m_100": BART_LIKE,
    "blenderbot": BART_LIKE,
    "prophetnet": {
        "vocab_size": 500,
        "hidden_size": 128,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 384,
        "decoder_ffn_dim": 384,
    },
    "bigbird_pegasus": {**BART_LIKE, "block_size": 8, "sequence": 128},
    "switch_transformers": {
        **T5_LIKE,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 4,
    },
    "nllb-moe": {**BART_LIKE, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "pegasus_x": {**BART_LIKE, "block_size": 32, "num_global_tokens": 16},
}

STATE_SPACE: dict[str, Sizes] = {
    "mamba": {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "batch": 2, "sequence": 64},
    "falcon_mamba": {
        "vocab_size": 500,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "batch": 2,
        "sequence": 64,
    },
    "mamba2": {
        "vocab_size": 500,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 32,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "jamba": {
        **SMALL_MOE,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "batch": 2,
        "sequence": 64,
    },
    "zamba": {
        **SMALL_MOE,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "batch": 2,
        "sequence": 64,
    },
    "zamba2": {
        "vocab_size": 500,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "mamba_d_state": 32,
        "chunk_size": 32,
    },
    "bamba": {
        **SMALL_MOE,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
        "mamba_chunk_size": 32,
    },
    "granitemoehybrid": {
        **SMALL_MOE,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 128,
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
        "mamba_chunk_size": 32,
    },
    "falcon_h1": {
        **SMALL_MOE,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
        "mamba_chunk_size": 32,
    },
}

RECURRENT: dict[str, Sizes] = {
    "rwkv": {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "sequence": 64},
    "recurrent_gemma": {
        "vocab_size": 500,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_window_size": 64,
    },
    "qwen3_next": {
        **SMALL_MOE,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {**SMALL_MOE, "layer_types": ["conv", "full_attention", "conv"]},
    "minimax": {**SMALL_MOE, "num_local_experts": 4, "block_size": 32},
}


def cases_of(
    kind: str,
    family: Callable[..., Build],
    table: Mapping[str, Sizes],
    convolutions: bool = False,
    data_dependent: bool = False,
) -> Iterator[Case]:
    """Make one case of each row of a table; the flags hold for all rows."""
    for model_type, sizes in table.items():
        yield Case(
            name=f"hf-{model_type.replace('_', '-')}",
            group="huggingface",
            build=family(model_type, **sizes),
            convolutions=convolutions or model_type in WITH_CONVOLUTIONS,
            data_dependent=data_dependent or model_type in DATA_DEPENDENT,
            kind=kind,
        )


# Exceptions to the flags of a whole table.
WITH_CONVOLUTIONS = {"convbert", "squeezebert", "nystromformer", "canine", "autoformer"}
WITH_CONVOLUTIONS |= {"recurrent_gemma", "qwen3_next", "lfm2"}
# LayerDrop, or experts called one by one. Most experts run as one grouped product, whose memory is fixed.
DATA_DEPENDENT = {"m2m_100", "nllb-moe", "switch_transformers", "jetmoe"}

CASES = [
    *cases_of("dense decoder", causal_lm, DENSE_DECODERS),
    *cases_of("MoE decoder", causal_lm, MOE_DECODERS),
    *cases_of("encoder", masked_lm, ENCODERS),
    *cases_of("encoder", text_classifier, TEXT_CLASSIFIERS),
    *cases_of("encoder-decoder", seq2seq, ENCODER_DECODERS),
    *cases_of("state space", causal_lm, STATE_SPACE, convolutions=True),
    *cases_of("recurrent", causal_lm, RECURRENT),
]
