"""Attention between words and vectors of positions or distances."""

import torch

from oracles import third_party
from oracles._shared import Take, flat, masked, softmax
from oracles.distance import distances, t5


class shaw:
    """Keys: transformers Wav2Vec2-BERT's relative_key attention. Values: the paper's
    equation 3, pair by pair.
    """

    CASES = [{"max_distance": 4}, {"max_distance": 4, "values": False}, {}]
    PARTLY_UNUSED = "rows of the future, and of distances beyond the input"

    def parameter_count(shape, options):
        tables = 2 if options["values"] else 1
        return (
            shape.n_layers * tables * (2 * options["max_distance"] + 1) * shape.head_dim
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        furthest = options["max_distance"]
        # clip(j - i), from 0: (1|B, T, T)
        rows = (-distances(positions)).clamp(-furthest, furthest) + furthest
        if bool((positions.diff() == 1).all()):
            weights = wav2vec2_bert(
                parameters["keys"][layer], shape, furthest, q, k, causal
            )
        else:
            # (B, T, T, d)
            vectors = parameters["keys"][layer][rows].expand(len(q), -1, -1, -1)
            logits = q @ k.mT + torch.einsum("bhid,bijd->bhij", q, vectors)
            weights = softmax(logits / shape.head_dim**0.5, causal)
        output = weights @ v
        if options["values"]:
            vectors = parameters["values"][layer][rows].expand(len(q), -1, -1, -1)
            output = output + torch.einsum("bhij,bijd->bhid", weights, vectors)
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
    attention.linear_k = Take(shape.d_model, 2 * shape.d_model)
    attention.linear_q = attention.linear_v = Take(0, shape.d_model)
    attention.linear_out = torch.nn.Identity()
    mask = masked(torch.zeros(1, 1, q.shape[2], q.shape[2]), causal)
    given = {
        "hidden_states": flat(q, k),
        "attention_mask": mask,
        "output_attentions": True,
    }
    return torch.func.functional_call(
        attention, {"distance_embedding.weight": table}, kwargs=given
    )[1]


class transformer_xl:
    """transformers XLNet, which has Transformer-XL's attention, where positions are
    consecutive; else plain loops.
    """

    CASES = [{}, {"base": 300.0}]

    def parameter_count(shape, options):
        return shape.n_layers * (shape.d_model * shape.d_model + 2 * shape.d_model)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        u, position, project = (
            parameters[key][layer] for key in ("content", "position", "projection")
        )

        def sinusoid(r):
            angles = r / options["base"] ** (
                torch.arange(0, shape.d_model, 2, dtype=torch.float64) / shape.d_model
            )
            return torch.cat([angles.sin(), angles.cos()]).float()

        length = q.shape[2]
        if not bool((positions.diff() == 1).all()):
            rows = [
                torch.stack(
                    [torch.stack([project @ sinusoid(i - j) for j in row]) for i in row]
                )
                for row in positions.tolist()
            ]  # B of (T, T, H, d)
            of_distance = torch.einsum(
                "bhid,bijhd->bhij", q + position[:, None], torch.stack(rows)
            )
            return {
                "probabilities": softmax(
                    ((q + u[:, None]) @ k.mT + of_distance) / shape.head_dim**0.5,
                    causal,
                )
            }
        config = third_party("transformers").XLNetConfig(
            d_model=shape.d_model,
            n_head=shape.n_heads,
            d_inner=8,
            n_layer=1,
            dropout=0.0,
            vocab_size=8,
        )
        waves = torch.stack([sinusoid(r) for r in range(length, -length, -1)])
        heads = torch.einsum("rm,hdm->rhd", waves, project)[:, None]
        hidden = (
            masked(torch.zeros(length, length), causal)
            .isinf()
            .float()[:, :, None, None]
        )
        attention = third_party(
            "transformers.models.xlnet.modeling_xlnet"
        ).XLNetRelativeAttention(config)
        # behind its projections of one input
        attention.forward = attention.rel_attn_core
        named = {"r_w_bias": u, "r_r_bias": position}
        content = (tensor.permute(2, 0, 1, 3) for tensor in (q, k, v))
        given = {"attn_mask": hidden, "output_attentions": True}
        _, weights = torch.func.functional_call(
            attention, named, (*content, heads), given
        )
        return {"probabilities": weights.permute(2, 3, 0, 1)}


class deberta:
    """transformers DeBERTa-v2's attention behind its projections, a sequence at a time,
    at distances handed to it.
    """

    CASES = [{"max_distance": 4}, {"max_distance": 20, "num_buckets": 8}, {}]
    PARTLY_UNUSED = "rows of the future, and of distances beyond the input"

    def parameter_count(shape, options):
        span = options["num_buckets"] or options["max_distance"] or shape.train_length
        return 2 * span * shape.d_model + 2 * shape.n_layers * shape.d_model**2

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        module = third_party("transformers.models.deberta_v2.modeling_deberta_v2")
        furthest = options["max_distance"] or shape.train_length
        buckets = options["num_buckets"] or -1
        width = shape.d_model
        length = q.shape[2]
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
        attention.query_proj, attention.key_proj, attention.value_proj = (
            Take(n * width, (n + 1) * width) for n in range(3)
        )
        # The bias of pos_key_proj moves whole rows; the paper has none, and neither
        # here.
        named = {
            f"pos_{name}_proj.bias": torch.zeros(width) for name in ("key", "query")
        }
        named["pos_key_proj.weight"] = parameters["keys"][layer].flatten(0, 1)
        named["pos_query_proj.weight"] = parameters["queries"][layer].flatten(0, 1)
        visible = ~masked(torch.zeros(1, 1, length, length), causal).isinf()
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
            weights.append(
                torch.func.functional_call(attention, named, kwargs=given)[1]
            )
        return {"probabilities": torch.cat(weights)}


class tupe:
    """The paper's equations; the bias of TUPE-R by the oracle of `t5`."""

    CASES = [{}, {"relative": True}]
    PARTLY_UNUSED = "buckets beyond the input; the bias of K, which moves whole rows"
    T5 = {"num_buckets": 32, "max_distance": 128}

    def parameter_count(shape, options):
        width = shape.d_model
        shared = shape.train_length * width + 2 * width + 2 * (width + 1) * width
        return shared + (
            t5.parameter_count(shape, tupe.T5) if options["relative"] else 0
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        vectors = parameters["table"][positions]  # (1|B, T, D)
        centred = vectors - vectors.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        places = scaled * parameters["norm.weight"] + parameters["norm.bias"]
        both = (
            places @ parameters["projection.weight"].T + parameters["projection.bias"]
        )
        asking, asked = (
            part.unflatten(-1, (shape.n_heads, -1)).transpose(1, 2)
            for part in both.chunk(2, dim=-1)
        )
        logits = (q @ k.mT + asking @ asked.mT) / (2 * shape.head_dim) ** 0.5
        if options["relative"]:
            table = {"table": parameters["relative.table"]}
            logits = (
                logits
                + t5.reference(
                    table, shape, tupe.T5, q, k, v, x, positions, layer, causal
                )["bias"]
            )
        return {"probabilities": softmax(logits, causal)}


class projected_bias:
    """transformers' Inkling for positions that all sequences share; else plain
    loops.
    """

    CASES = [{}, {"extent": 5, "curves": 3}]

    def parameter_count(shape, options):
        extent = options["extent"] or shape.train_length
        return (
            shape.n_layers
            * options["curves"]
            * (shape.n_heads * shape.d_model + extent)
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        weight = parameters["weight"][layer]
        curves = parameters["curves"][layer]
        count, extent = curves.shape
        mixtures = torch.einsum("btd,hcd->bthc", x, weight)
        if len(positions) > 1:
            zero = torch.zeros(shape.n_heads)
            rows = [
                torch.stack(
                    [
                        mixed @ curves[:, i - j] if 0 <= i - j < extent else zero
                        for j in row
                    ]
                )
                for of_sequence, row in zip(mixtures, positions.tolist(), strict=True)
                for i, mixed in zip(row, of_sequence, strict=True)
            ]
            return {
                "bias": torch.stack(rows).unflatten(0, (len(x), -1)).permute(0, 3, 1, 2)
            }
        module = third_party(
            "transformers.models.inkling.modeling_inkling"
        ).InklingRelativeLogits(count, extent)
        bias = torch.func.functional_call(
            module, {"proj": curves}, (mixtures, positions[0], positions[0])
        )
        return {"bias": bias}
