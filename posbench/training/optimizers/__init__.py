"""Optimizers: a class per file, made as `cls(groups, training)`.

Each group has its `params`, `weight_decay` and, before every step, `lr`. Where
`self.found_inf` is 1 after an update that was not finite, a step changes nothing.
"""
