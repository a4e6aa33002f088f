"""Optimizers: a class per file, made as `cls(groups, training)`.

Each group has its `params`, `weight_decay` and, before every step, `lr`: `times` the
learning rate, if the group has that. A group of the blocks' matrices has `parts`, for
each weight the rows of the matrices that it holds. Where
`self.found_inf` is 1 after an update that was not finite, a step changes nothing.
"""
