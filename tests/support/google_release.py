"""SigLIP-2 in the form of Google's release: a .npz of big_vision's names, in flax's layouts."""

import numpy as np

ATTENTION = "MultiHeadDotProductAttention_0"
# Google's names, and timm's.
ANYWHERE = {
    "LayerNorm_0": "norm1",
    f"{ATTENTION}/query": "attn.q",
    f"{ATTENTION}/key": "attn.k",
    f"{ATTENTION}/value": "attn.v",
    f"{ATTENTION}/out": "attn.proj",
    "MlpBlock_0/Dense_0": "mlp.fc1",
    "MlpBlock_0/Dense_1": "mlp.fc2",
}
BLOCK = ANYWHERE | {"LayerNorm_1": "norm2"}
HEAD = {
    theirs: name.replace("norm1", "norm").replace("attn.", "") for theirs, name in ANYWHERE.items()
}


def release(model, stacked=False):
    """The arrays of a NaFlexVit of SigLIP-2's design, beside some of a text tower.

    ``stacked``: each array holds all blocks, as ``scan=True`` writes them.
    """
    own = {}
    for name, tensor in model.state_dict().items():
        # What one product computes are layers of their own.
        together = "qkv" if ".qkv." in name else "kv"
        parts = together if f".{together}." in name else [None]
        for part, array in zip(parts, np.split(tensor.numpy(), len(parts)), strict=True):
            own[name.replace(f".{together}.", f".{part}.")] = array
    heads = model.blocks[0].attn.num_heads
    arrays = layer("embedding", own, "embeds.proj", heads)
    arrays |= layer("Transformer/encoder_norm", own, "norm", heads)
    arrays["pos_embedding"] = own["embeds.pos_embed"][0]
    blocks = []
    for number in range(len(model.blocks)):
        blocks.append({})
        for theirs, name in BLOCK.items():
            blocks[-1] |= layer(theirs, own, f"blocks.{number}.{name}", heads)
    if stacked:
        for name in blocks[0]:
            arrays[f"Transformer/encoderblock/{name}"] = np.stack([block[name] for block in blocks])
    else:
        for number, block in enumerate(blocks):
            arrays |= {f"Transformer/encoderblock_{number}/{name}": block[name] for name in block}
    if model.attn_pool is not None:
        arrays["MAPHead_0/probe"] = own["attn_pool.latent"]
        for theirs, name in HEAD.items():
            arrays |= layer(f"MAPHead_0/{theirs}", own, f"attn_pool.{name}", heads)
    arrays = {f"params/img/{name}": array for name, array in arrays.items()}
    return arrays | {"params/txt/Embed_0/embedding": np.ones((3, 2), "f4"), "params/t": np.ones(1)}


def layer(theirs, own, name, heads):
    """The arrays of a layer: flax's kernels are transposed, those of attention by head."""
    weight, bias = own[f"{name}.weight"], own[f"{name}.bias"]
    if weight.ndim == 1:
        return {f"{theirs}/scale": weight, f"{theirs}/bias": bias}
    kernel = weight.T
    if theirs.endswith(("query", "key", "value")):
        kernel = kernel.reshape(len(kernel), heads, -1)
        bias = bias.reshape(heads, -1)
    elif theirs.endswith("out"):
        kernel = kernel.reshape(heads, -1, kernel.shape[1])
    return {f"{theirs}/kernel": kernel, f"{theirs}/bias": bias}
