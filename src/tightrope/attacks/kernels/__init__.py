"""Attacks by less work for the same result, on a CPU: compiled loops over chains of layers.

Nothing here is needed to understand an attack: `attacks.pgd` is the loop and `attacks.latent` the
latent attack; they come here where a network is a chain of affine layers and ReLUs (`chains`).

- `chain_attack` is the latent attack on chains. It takes one of two ways: `reduced` for small
  classifiers (only what can change inside a box is left of them; `stability`, `windows`),
  `increments` for large ones (changes are followed from step to step; `layouts`, `last_layer`).
- `small` evaluates networks of few channels, 16 points at a time.
- `*_kernel` are the compiled loops, `compiling` how they are compiled and kept.
"""
