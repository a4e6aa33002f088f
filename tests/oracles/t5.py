"""T5's bias, with the buckets of transformers."""

from oracles import third_party

CASES = [{}, {"num_buckets": 8, "max_distance": 20}, {"num_buckets": 32, "max_distance": 64}, {"num_buckets": 7}]
PARTLY_UNUSED = "buckets beyond the input"


def parameter_count(shape, options):
    return options["num_buckets"] * shape.n_heads


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    t5 = third_party("transformers.models.t5.modeling_t5")
    relative = positions[:, None, :] - positions[:, :, None]  # key minus query
    bucket = t5.T5Attention._relative_position_bucket(
        relative,
        bidirectional=False,
        num_buckets=options["num_buckets"],
        max_distance=options["max_distance"],
    )
    return {"bias": parameters["table"][bucket].permute(0, 3, 1, 2)}
