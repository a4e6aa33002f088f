"""Optimizers: a class per file, made as `cls(groups, training)`.

Each group has its `params`, `weight_decay` and `lr`, set before every step: the
learning rate, times the group's `times` if it has one. A group of the blocks' matrices
has `parts`, for each weight the rows of the matrices that it holds. A weight that
nothing reads has the gradient None.

`self.found_inf`, which is set before every step but on MPS, is 1 after an update that
was not finite. Then a step changes nothing.
"""
