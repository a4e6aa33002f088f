"""Attention between words and vectors of positions or distances."""

import torch
from torch.func import functional_call

from oracles import third_party
from oracles._shared import Take, flat, masked, softmax
from oracles.distance import distances, t5


def are_consecutive(positions):
    return bool((positions.diff() == 1).all())


def mask_of(length, causal):
    return masked(torch.zeros(1, 1, length, length), causal)


class shaw:
    """Keys: transformers Wav2Vec2-BERT's relative_key attention. Values: the paper's
    equation 3, pair by pair.
    """

    CASES = [{"max_distance": 4}, {"max_distance": 4, "values": False}, {}]
    PARTLY_UNUSED = "rows of the future, and of distances beyond the input"

    def parameter_count(shape, options):
        tables = 2 if options["values"] else 1
        rows = 2 * options["max_distance"] + 1
        return shape.n_layers * tables * rows * shape.head_dim

    def reference(parameters, shape, options, q, k, v, positions, layer, causal, **_):
        furthest = options["max_distance"]
        away = -distances(positions)  # j - i
        clipped = away.clamp(-furthest, furthest)
        rows = clipped + furthest  # from 0: (1|B, T, T)
        rows = rows.expand(len(q), -1, -1)

        keys = parameters["keys"][layer]
        if are_consecutive(positions):
            weights = wav2vec2_bert(keys, shape, furthest, q, k, causal)
        else:
            of_pairs = torch.einsum("bhid,bijd->bhij", q, keys[rows])
            logits = q @ k.mT + of_pairs
            weights = softmax(logits / shape.head_dim**0.5, causal)

        output = weights @ v
        if options["values"]:
            values = parameters["values"][layer][rows]  # (B, T, T, Dh)
            output = output + torch.einsum("bhij,bijd->bhid", weights, values)
        return {"probabilities": weights, "output": output}


def wav2vec2_bert(table, shape, furthest, q, k, causal):
    """Attention weights through the module's own forward, which counts tokens."""
    config = third_party("transformers").Wav2Vec2BertConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=furthest,
        right_max_position_embeddings=furthest,
        attention_dropout=0.0,
        attn_implementation="eager",  # the one that returns its weights
    )
    module = third_party("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    attention = module.Wav2Vec2BertSelfAttention(config).eval()
    # Its projections read one input: here queries and keys side by side, which they
    # take apart.
    attention.linear_q = Take(0, shape.d_model)
    attention.linear_k = Take(shape.d_model, 2 * shape.d_model)
    attention.linear_v = Take(0, shape.d_model)
    attention.linear_out = torch.nn.Identity()

    named = {"distance_embedding.weight": table}
    given = {
        "hidden_states": flat(q, k),
        "attention_mask": mask_of(q.shape[2], causal),
        "output_attentions": True,
    }
    _, weights = functional_call(attention, named, kwargs=given)
    return weights


class transformer_xl:
    """transformers XLNet, which has Transformer-XL's attention, where positions are
    consecutive; else plain loops.
    """

    CASES = [{}, {"base": 300.0}]

    def parameter_count(shape, options):
        projection = shape.d_model * shape.d_model
        return shape.n_layers * (projection + 2 * shape.d_model)

    def reference(parameters, shape, options, q, k, positions, layer, causal, **others):
        content = parameters["content"][layer]  # (H, Dh)
        position = parameters["position"][layer]
        projection = parameters["projection"][layer]  # (H, Dh, D)

        even = torch.arange(0, shape.d_model, 2, dtype=torch.float64)
        speeds = options["base"] ** (even / shape.d_model)

        def sinusoid(distance):
            angles = distance / speeds
            return torch.cat([angles.sin(), angles.cos()]).float()

        if are_consecutive(positions):
            length = q.shape[2]
            waves = [sinusoid(r) for r in range(length, -length, -1)]
            vectors = torch.einsum("rm,hdm->rhd", torch.stack(waves), projection)
            weights = xlnet(content, position, vectors, shape, q, k, causal)
            return {"probabilities": weights}

        vectors = []
        for row in positions.tolist():
            rows = []
            for i in row:
                of_query = [projection @ sinusoid(i - j) for j in row]
                rows.append(torch.stack(of_query))
            vectors.append(torch.stack(rows))
        vectors = torch.stack(vectors)  # (1|B, T, T, H, Dh)
        asking = q + position[:, None]
        of_distance = torch.einsum("bhid,bijhd->bhij", asking, vectors)
        of_content = (q + content[:, None]) @ k.mT
        logits = (of_content + of_distance) / shape.head_dim**0.5
        return {"probabilities": softmax(logits, causal)}


def xlnet(content, position, vectors, shape, q, k, causal):
    """Attention weights by its layer, behind its projections of one input."""
    config = third_party("transformers").XLNetConfig(
        d_model=shape.d_model,
        n_head=shape.n_heads,
        d_inner=8,
        n_layer=1,
        dropout=0.0,
        vocab_size=8,
    )
    xlnet = third_party("transformers.models.xlnet.modeling_xlnet")
    attention = xlnet.XLNetRelativeAttention(config)
    attention.forward = attention.rel_attn_core

    named = {"r_w_bias": content, "r_r_bias": position}
    q = q.permute(2, 0, 1, 3)  # (T, B, H, Dh)
    k = k.permute(2, 0, 1, 3)
    is_hidden = mask_of(len(q), causal).isinf()
    mask = is_hidden.float().permute(2, 3, 0, 1)
    given = {
        "q_head": q,
        "k_head_h": k,
        "v_head_h": k,
        "k_head_r": vectors[:, None],
        "attn_mask": mask,
        "output_attentions": True,
    }
    _, weights = functional_call(attention, named, kwargs=given)
    return weights.permute(2, 3, 0, 1)


class deberta:
    """transformers DeBERTa-v2's attention behind its projections, a sequence at a time,
    at distances handed to it.
    """

    CASES = [{"max_distance": 4}, {"max_distance": 20, "num_buckets": 8}, {}]
    PARTLY_UNUSED = "rows of the future, and of distances beyond the input"

    def parameter_count(shape, options):
        span = options["num_buckets"] or options["max_distance"] or shape.train_length
        table = 2 * span * shape.d_model
        projections = 2 * shape.n_layers * shape.d_model**2
        return table + projections

    def reference(
        parameters, shape, options, q, k, v, positions, layer, causal, **others
    ):
        module = third_party("transformers.models.deberta_v2.modeling_deberta_v2")
        furthest = options["max_distance"] or shape.train_length
        buckets = options["num_buckets"] or -1
        width = shape.d_model
        config = third_party("transformers").DebertaV2Config(
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
        attention.query_proj = Take(0, width)
        attention.key_proj = Take(width, 2 * width)
        attention.value_proj = Take(2 * width, 3 * width)
        named = {
            "pos_key_proj.weight": parameters["keys"][layer].flatten(0, 1),
            "pos_query_proj.weight": parameters["queries"][layer].flatten(0, 1),
            # it moves whole rows; the paper has none, and neither here
            "pos_key_proj.bias": torch.zeros(width),
            "pos_query_proj.bias": torch.zeros(width),
        }

        visible = ~mask_of(q.shape[2], causal).isinf()
        weights = []
        for b, sequence in enumerate(flat(q, k, v)):
            distance = distances(positions)[b % len(positions)]
            if buckets > 0:
                distance = module.make_log_bucket_position(distance, buckets, furthest)
            given = {
                "hidden_states": sequence[None],
                "attention_mask": visible,
                "relative_pos": distance.long()[None],
                "rel_embeddings": parameters["table"],
                "output_attentions": True,
            }
            _, of_sequence = functional_call(attention, named, kwargs=given)
            weights.append(of_sequence)
        return {"probabilities": torch.cat(weights)}


class tupe:
    """The paper's equations; the bias of TUPE-R by the oracle of `t5`."""

    CASES = [{}, {"relative": True}]
    PARTLY_UNUSED = "buckets beyond the input; the bias of K, which moves whole rows"
    T5 = {"num_buckets": 32, "max_distance": 128}

    def parameter_count(shape, options):
        width = shape.d_model
        table = shape.train_length * width
        norm = 2 * width
        projection = 2 * (width + 1) * width
        shared = table + norm + projection
        if options["relative"]:
            return shared + t5.parameter_count(shape, tupe.T5)
        return shared

    def reference(parameters, shape, options, q, k, positions, causal, **others):
        vectors = parameters["table"][positions]  # (1|B, T, D)
        centred = vectors - vectors.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        deviation = (variance + 1e-5).sqrt()
        scaled = centred / deviation
        places = scaled * parameters["norm.weight"] + parameters["norm.bias"]

        both = places @ parameters["projection.weight"].T
        both = both + parameters["projection.bias"]  # (1|B, T, 2D)
        heads = both.unflatten(-1, (2, shape.n_heads, -1))
        asking, asked = heads.permute(2, 0, 3, 1, 4)  # (1|B, H, T, Dh)
        logits = q @ k.mT + asking @ asked.mT
        logits = logits / (2 * shape.head_dim) ** 0.5
        if options["relative"]:
            table = {"table": parameters["relative.table"]}
            of_t5 = t5.reference(table, tupe.T5, positions)
            logits = logits + of_t5["bias"]
        return {"probabilities": softmax(logits, causal)}


class projected_bias:
    """transformers' Inkling for positions that all sequences share; else plain
    loops.
    """

    CASES = [{}, {"extent": 5, "curves": 3}]

    def parameter_count(shape, options):
        extent = options["extent"] or shape.train_length
        per_curve = shape.n_heads * shape.d_model + extent
        return shape.n_layers * options["curves"] * per_curve

    def reference(parameters, x, positions, layer, **others):
        weight = parameters["weight"][layer]
        curves = parameters["curves"][layer]
        mixtures = torch.einsum("btd,hcd->bthc", x, weight)
        if len(positions) == 1:
            inkling = third_party("transformers.models.inkling.modeling_inkling")
            module = inkling.InklingRelativeLogits(*curves.shape)
            given = (mixtures, positions[0], positions[0])
            bias = functional_call(module, {"proj": curves}, given)
            return {"bias": bias}

        extent = curves.shape[1]
        zero = torch.zeros(weight.shape[0])
        biases = []
        for mixed, row in zip(mixtures, positions.tolist(), strict=True):
            for t, i in enumerate(row):
                for distance in [i - j for j in row]:
                    if 0 <= distance < extent:
                        biases.append(mixed[t] @ curves[:, distance])
                    else:
                        biases.append(zero)
        sizes = (*positions.shape, positions.shape[1])
        bias = torch.stack(biases).unflatten(0, sizes)  # (B, T, T, H)
        return {"bias": bias.permute(0, 3, 1, 2)}
