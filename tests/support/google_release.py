"""SigLIP-2 in the form of Google's release: a .npz of big_vision's names, in flax's layouts."""

import numpy as np

ATTENTION = "MultiHeadDotProductAttention_0"


def release(model, stacked=False):
    """The arrays of a NaFlexVit of SigLIP-2's design, beside some of a text tower.

    ``stacked``: each array holds all blocks, as ``scan=True`` writes them.
    """
    own = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    heads = model.blocks[0].attn.num_heads
    arrays = {
        **dense("embedding", own, "embeds.proj"),
        "pos_embedding": own["embeds.pos_embed"][0],
        **norm("Transformer/encoder_norm", own, "norm"),
    }
    blocks = []
    for number in range(len(model.blocks)):
        name = f"blocks.{number}"
        qkv = {part: np.split(own[f"{name}.attn.qkv.{part}"], 3) for part in ("weight", "bias")}
        queries = zip(("query", "key", "value"), qkv["weight"], qkv["bias"])
        block = attention(queries, own, f"{name}.attn.proj", heads)
        block |= norm("LayerNorm_0", own, f"{name}.norm1")
        block |= norm("LayerNorm_1", own, f"{name}.norm2")
        block |= mlp(own, f"{name}.mlp")
        blocks.append(block)
    if stacked:
        for name in blocks[0]:
            arrays[f"Transformer/encoderblock/{name}"] = np.stack([block[name] for block in blocks])
    else:
        for number, block in enumerate(blocks):
            arrays |= {f"Transformer/encoderblock_{number}/{name}": block[name] for name in block}
    if model.attn_pool is not None:
        arrays |= {f"MAPHead_0/{name}": array for name, array in pooling(own, heads).items()}
    arrays = {f"params/img/{name}": array for name, array in arrays.items()}
    return arrays | {"params/txt/Embed_0/embedding": np.ones((3, 2), "f4"), "params/t": np.ones(1)}


def pooling(own, heads):
    kv = {part: np.split(own[f"attn_pool.kv.{part}"], 2) for part in ("weight", "bias")}
    weights = (own["attn_pool.q.weight"], *kv["weight"])
    biases = (own["attn_pool.q.bias"], *kv["bias"])
    queries = zip(("query", "key", "value"), weights, biases)
    return {
        "probe": own["attn_pool.latent"],
        **attention(queries, own, "attn_pool.proj", heads),
        **norm("LayerNorm_0", own, "attn_pool.norm"),
        **mlp(own, "attn_pool.mlp"),
    }


def attention(queries, own, projection, heads):
    arrays = {}
    for name, weight, bias in queries:
        width = len(bias)
        arrays[f"{ATTENTION}/{name}/kernel"] = weight.T.reshape(width, heads, width // heads)
        arrays[f"{ATTENTION}/{name}/bias"] = bias.reshape(heads, width // heads)
    arrays |= dense(f"{ATTENTION}/out", own, projection)
    kernel = arrays[f"{ATTENTION}/out/kernel"]
    arrays[f"{ATTENTION}/out/kernel"] = kernel.reshape(heads, -1, kernel.shape[1])
    return arrays


def mlp(own, name):
    first = dense("MlpBlock_0/Dense_0", own, f"{name}.fc1")
    return first | dense("MlpBlock_0/Dense_1", own, f"{name}.fc2")


def dense(name, own, theirs):
    return {f"{name}/kernel": own[f"{theirs}.weight"].T, f"{name}/bias": own[f"{theirs}.bias"]}


def norm(name, own, theirs):
    return {f"{name}/scale": own[f"{theirs}.weight"], f"{name}/bias": own[f"{theirs}.bias"]}
