"""Floating-point operations of a model, for the FLOP utilisation."""

from specjax.models.config import TransformerConfig


def forward_flops(config: TransformerConfig, context: int) -> int:
    """Matrix-product FLOPs per token of one forward over texts of `context` tokens.

    Two per weight of every matrix (the output head counts whether tied or not, the embedding look-up does not) and
    4 · heads · head width · context per layer for the attention's two products, the convention of PaLM (Chowdhery et
    al. 2022, arXiv 2204.02311, appendix B), which does not halve it for causality.
    """
    query = config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    attention = config.d_model * (2 * query + key_value)
    mlp = config.d_model * config.d_ff * (3 if config.gated_mlp else 2)
    weights = config.num_layers * (attention + mlp) + config.d_model * config.vocab_size
    return 2 * weights + config.num_layers * 4 * query * context


def training_flops(config: TransformerConfig, context: int) -> int:
    """FLOPs per token of forward and backward: three forwards. Recomputation (remat) is work, not model FLOPs."""
    return 3 * forward_flops(config, context)
