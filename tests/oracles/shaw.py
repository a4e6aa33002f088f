"""Keys: transformers Wav2Vec2-BERT's relative_key attention. Values: plain loops from the paper's equation 3."""

import torch

from oracles import third_party
from oracles._attention import Take

CASES = [{"max_distance": 4}, {"max_distance": 4, "values": False}, {}]
PARTLY_UNUSED = "rows of the future, and of distances beyond the input"


def parameter_count(shape, options):
    tables = 2 if options["values"] else 1
    return shape.n_layers * tables * (2 * options["max_distance"] + 1) * shape.head_dim


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    weights = probabilities(parameters, shape, options, q, k, positions, layer, causal)
    output = weights @ v
    if options["values"]:
        output = output + value_path(parameters["values"][layer], options["max_distance"], weights, positions)
    return {"probabilities": weights, "output": output}


def probabilities(parameters, shape, options, q, k, positions, layer, causal):
    """Through the module's own forward where positions are consecutive, since it counts tokens; else by loops."""
    length, furthest = q.shape[2], options["max_distance"]
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril() if causal else torch.zeros(length, length).bool()
    if not bool((positions.diff() == 1).all()):
        logits = torch.einsum("bhid,bhjd->bhij", q, k)
        vectors = parameters["keys"][layer][relative(positions, furthest)]  # (B, T, T, d)
        logits = (logits + torch.einsum("bhid,bijd->bhij", q, vectors.expand(len(q), -1, -1, -1))) / q.shape[-1] ** 0.5
        return logits.masked_fill(hidden, -torch.inf).softmax(-1)
    transformers = third_party("transformers")
    module = third_party("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=furthest,
        right_max_position_embeddings=furthest,
        attention_dropout=0.0,
        attn_implementation="eager",  # the one that returns its weights
    )
    attention = module.Wav2Vec2BertSelfAttention(config).eval()
    # Its projections read one input: here queries and keys side by side, which they take apart.
    both = torch.cat((q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)), dim=-1)
    attention.linear_k = Take(shape.d_model, 2 * shape.d_model)
    attention.linear_q = Take(0, shape.d_model)
    attention.linear_v = Take(0, shape.d_model)
    attention.linear_out = torch.nn.Identity()
    mask = torch.zeros(1, 1, length, length).masked_fill(hidden, -torch.inf)
    named = {"distance_embedding.weight": parameters["keys"][layer]}
    kwargs = {"hidden_states": both, "attention_mask": mask, "output_attentions": True}
    return torch.func.functional_call(attention, named, kwargs=kwargs)[1]


def relative(positions, furthest):
    """clip(j - i) shifted to start at 0: (1|B, T, T)."""
    return (positions[:, None, :] - positions[:, :, None]).clamp(-furthest, furthest) + furthest


def value_path(table, furthest, weights, positions):
    index = relative(positions, furthest).expand(len(weights), -1, -1).tolist()
    batch, _, length, _ = weights.shape
    rows = []
    for b in range(batch):
        for i in range(length):
            rows.append(sum(weights[b, :, i, j, None] * table[index[b][i][j]] for j in range(length)))  # (H, d)
    return torch.stack(rows).view(batch, length, *rows[0].shape).transpose(1, 2)
