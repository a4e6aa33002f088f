"""transformers DeBERTa-v2's attention behind its projections, a sequence at a time, at distances handed to it."""

import torch

from oracles import third_party
from oracles._attention import Take

CASES = [{"max_distance": 4}, {"max_distance": 20, "num_buckets": 8}, {}]
PARTLY_UNUSED = "rows of the future, and of distances beyond the input"


def parameter_count(shape, options):
    span = options["num_buckets"] or options["max_distance"] or shape.train_length
    return 2 * span * shape.d_model + 2 * shape.n_layers * shape.d_model**2


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    transformers = third_party("transformers")
    module = third_party("transformers.models.deberta_v2.modeling_deberta_v2")
    furthest, buckets = options["max_distance"] or shape.train_length, options["num_buckets"] or -1
    width, length = shape.d_model, q.shape[2]
    config = transformers.DebertaV2Config(
        hidden_size=width,
        num_attention_heads=shape.n_heads,
        relative_attention=True,
        position_buckets=buckets,
        max_relative_positions=furthest,
        pos_att_type=["c2p", "p2c"],
        share_att_key=False,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    attention = module.DisentangledSelfAttention(config).eval()
    attention.query_proj, attention.key_proj, attention.value_proj = (
        Take(n * width, (n + 1) * width) for n in range(3)
    )
    # The bias of pos_key_proj moves whole rows; the paper has none, and neither here.
    named = {
        "pos_key_proj.weight": parameters["keys"][layer].flatten(0, 1),
        "pos_query_proj.weight": parameters["queries"][layer].flatten(0, 1),
        "pos_key_proj.bias": torch.zeros(width),
        "pos_query_proj.bias": torch.zeros(width),
    }
    seen = torch.ones(1, 1, length, length, dtype=torch.bool)
    weights = []
    for b, sequence in enumerate(torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=-1)):
        row = positions[b % len(positions)]
        distance = row[:, None] - row
        if buckets > 0:
            distance = module.make_log_bucket_position(distance, buckets, furthest)
        given = {
            "hidden_states": sequence[None],
            "attention_mask": seen.tril() if causal else seen,
            "relative_pos": distance.long()[None],
            "rel_embeddings": parameters["table"],
            "output_attentions": True,
        }
        weights.append(torch.func.functional_call(attention, named, kwargs=given)[1])
    return {"probabilities": torch.cat(weights)}
