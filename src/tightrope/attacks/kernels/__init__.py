"""Attacks by less work for the same result, on a CPU: compiled loops over chains of layers.

Nothing here is needed to understand an attack: `attacks.pgd` is the loop and `attacks.latent` the
latent attack. They come here where a network is a chain `affine, ReLU, ..., affine` (`chains`), an
affine layer being a convolution or a linear one; other networks, and other devices, take the plain
way.

Which kernel serves which layers, and why. The figures are speed-ups over the textbook loop in
`docs/results/benchmarks/latent.txt` (`benchmarks/latent.py`); the plain way has 0.9 to 1.6 there.

`reduced`: up to two hidden layers and a million products, convolution or linear before linear
    (CNN3, narrow CNN7). Few ReLUs can change sign inside a latent box. Only they are left of the
    classifier, and 16 estimators share the registers. 6.8 and 6.6 on CNN3 with 1 and 2 ReLUs
    behind the cut, 3.8 on the tiny one.
`increments`: larger ones, such as a large linear layer before a linear one (CNN7, 1 ReLU). After
    the steps that cross the box few coordinates move, so only changes are followed. 3.2.
`increments` with `last_layer`: convolutions and a large linear layer before a linear one (CNN7, 2
    and more ReLUs). To read the weights of the large layer takes most of the time: it is narrowed
    to the neurons that can flip. 2.2 with 3 ReLUs, 1.6 without narrowing.
`small`: whole networks of up to 16,000 products in PGD, behind a normalisation (the tiny CNN3).
    The library cannot keep the processor busy with a few channels: here 16 points share the
    registers. Without it, a SABR step takes 1.6 times the processor's time.

How they are made:

- `chain_attack` is the latent attack on chains; it draws the starting points on all threads.
- `stability` says which ReLUs can change sign. `windows` lays out layers for `reduced` and
  `small`, `layouts` for `increments`.
- `*_kernel` are the compiled loops: `reduction_kernel` makes the reduced classifier and
  `reduced_kernel` climbs in it; `changes_kernel` follows the changes of a step and
  `increments_kernel` climbs by them; `small_kernel`. The vector instructions of their innermost
  loops are in `lanes_kernel` and `rows_kernel`.
- `compiling` is how they are compiled and kept.
"""
