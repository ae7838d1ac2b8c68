"""Speculative decoding research in JAX and Flax: train a target, distil a drafter, decode losslessly."""
