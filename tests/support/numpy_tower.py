"""SigLIP-2's image tower written a second time, in NumPy: a port that can make mistakes.

It shares no code with the package, so what it gives is what a port in another language would.
"""

from dataclasses import dataclass, field
from math import erf

import numpy as np


def weights_of(model):
    """timm's weights in float64."""
    return {name: one.double().numpy() for name, one in model.state_dict().items()}


def hat(x):
    """The kernel of bilinear resizing."""
    return np.maximum(0, 1 - np.abs(x))


def lanczos(x):
    """The kernel of Lanczos resizing, three lobes on each side."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def weights_of_cells(source, target, kernel):
    """The matrix (target, source) of resizing with antialiasing, edges cut."""
    scale = source / target
    reach = max(scale, 1.0)
    centers = (np.arange(target) + 0.5) * scale - 0.5
    weights = kernel((np.arange(source) - centers[:, None]) / reach)
    return weights / weights.sum(1, keepdims=True)


def resized(table, h, w, kernel=hat):
    """A table (H, W, C) resized to (h, w), as tokens (h * w, C)."""
    rows = weights_of_cells(len(table), h, kernel)
    columns = weights_of_cells(table.shape[1], w, kernel)
    return np.einsum("ha,wb,abc->hwc", rows, columns, table).reshape(h * w, -1)


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def exact_gelu(x):
    return 0.5 * x * (1 + np.vectorize(erf)(x / 2**0.5))


def quick_gelu(x):
    return x / (1 + np.exp(-1.702 * x))


def silu(x):
    return x / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@dataclass
class Port:
    """The tower. Each field but the first three is a choice in which ports err."""

    weights: dict
    heads: int
    length: int  # patches of a padded picture
    kernel: object = None  # from the patch kernel (C, p, p, 3) to another of its size
    position: object = resized  # (table, h, w) -> (h * w, C)
    act: object = tanh_gelu
    eps: float = 1e-6
    rms: bool = False  # LayerNorm takes no mean off and adds no bias
    padded_as_in: str = "timm"  # or "transformers": what padded tokens hold and attend to
    masks: bool = True
    causal: bool = False
    block_heads: float = 1  # times the right number
    scale: float | None = None
    order: tuple = (0, 1, 2)  # which third is read as query, key, value
    interleaved: bool = False
    without: tuple = ()  # biases: q k v proj fc1 fc2
    out_projection: bool = True
    block: str = "right"
    blocks: tuple | None = None  # their numbers, None for one left out
    last_norm: bool = True
    head: dict = field(default_factory=dict)

    def linear(self, x, name, bias=True):
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if bias else y

    def norm(self, x, name, eps=None):
        if not self.rms:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + (eps or self.eps))
        x = x * self.weights[f"{name}.weight"]
        return x if self.rms else x + self.weights[f"{name}.bias"]

    def mlp(self, x, name):
        inner = self.act(self.linear(x, f"{name}.fc1", "fc1" not in self.without))
        return self.linear(inner, f"{name}.fc2", "fc2" not in self.without)

    def attend(self, q, k, v, heads, scale, allowed):
        """Attention of tokens (n, C) to tokens (m, C); ``allowed`` (n, m) is bool.

        Who may attend to none attends to all alike.
        """
        q, k, v = (x.reshape(len(x), heads, -1).swapaxes(0, 1) for x in (q, k, v))
        logits = q @ k.swapaxes(1, 2) * scale(q.shape[2])
        found = softmax(np.where(allowed, logits, -1e300)) @ v  # (heads, n, C / heads)
        return found.swapaxes(0, 1).reshape(found.shape[1], -1)

    def attention(self, x, name, allowed):
        heads = int(self.heads * self.block_heads)
        thirds = np.split(self.linear(x, f"{name}.qkv", bias=False), 3, axis=1)
        biases = np.split(self.weights[f"{name}.qkv.bias"], 3)
        for place, letter in enumerate("qkv"):
            if letter not in self.without:
                thirds[place] = thirds[place] + biases[place]
        parts = [thirds[place] for place in self.order]
        if self.interleaved:
            both = np.concatenate(thirds, 1).reshape(len(x), heads, 3, -1)
            parts = [both[:, :, place].reshape(len(x), -1) for place in range(3)]
        scale = self.scale or (lambda size: size**-0.5)
        y = self.attend(*parts, heads, scale, allowed)
        if not self.out_projection:
            return y
        return self.linear(y, f"{name}.proj", "proj" not in self.without)

    def run_block(self, x, number, allowed):
        name = f"blocks.{number}"

        def attention(x):
            return self.attention(x, f"{name}.attn", allowed)

        def mlp(x):
            return self.mlp(x, f"{name}.mlp")

        def first(x):
            return self.norm(x, f"{name}.norm1")

        def second(x):
            return self.norm(x, f"{name}.norm2")

        if self.block == "post_norm":
            x = first(x + attention(x))
            return second(x + mlp(x))
        if self.block == "swapped_norms":
            x = x + attention(second(x))
            return x + mlp(first(x))
        if self.block == "no_norms":
            x = x + attention(x)
            return x + mlp(x)
        if self.block == "no_first_norm":
            x = x + attention(x)
            return x + mlp(second(x))
        if self.block == "no_second_norm":
            x = x + attention(first(x))
            return x + mlp(x)
        if self.block == "no_attention":
            return x + mlp(second(x))
        if self.block == "no_mlp":
            return x + attention(first(x))
        if self.block == "no_attention_residual":
            x = attention(first(x))
            return x + mlp(second(x))
        if self.block == "no_mlp_residual":
            x = x + attention(first(x))
            return mlp(second(x))
        if self.block == "parallel":
            return x + attention(first(x)) + mlp(second(x))
        x = x + attention(first(x))
        return x + mlp(second(x))

    def pooled(self, x, valid):
        """The head; ``self.head`` names what is wrong in it."""
        wrong = self.head
        if "mean" in wrong:
            return (x[valid] if wrong["mean"] == "valid" else x).mean(0)
        if "largest" in wrong:
            return x[valid].max(0)
        if "first" in wrong:
            return x[0]
        without = wrong.get("without", ())  # biases: q kv proj fc1 fc2
        probe = self.weights["attn_pool.latent"].reshape(1, -1)
        q = probe if "probe" in wrong else self.linear(probe, "attn_pool.q", "q" not in without)
        k, v = np.split(self.linear(x, "attn_pool.kv", "kv" not in without), 2, axis=1)
        if "k_v" in wrong:
            k, v = v, k
        heads = int(self.heads * wrong.get("heads", 1))  # times the right number
        allowed = valid[None] | bool(wrong.get("unmasked"))
        scale = wrong.get("scale", lambda size: size**-0.5)
        y = self.attend(q, k, v, heads, scale, allowed)
        if "no_projection" not in wrong:
            y = self.linear(y, "attn_pool.proj", "proj" not in without)
        if "no_mlp" in wrong:
            return y[0]
        inner = y if "no_norm" in wrong else self.norm(y, "attn_pool.norm", wrong.get("eps"))
        act = wrong.get("act", self.act)
        z = act(self.linear(inner, "attn_pool.mlp.fc1", "fc1" not in without))
        z = self.linear(z, "attn_pool.mlp.fc2", "fc2" not in without)
        if "no_residual" not in wrong:
            z = z + y
        z = z[0]
        return z / np.sqrt((z * z).sum()) if "normalized" in wrong else z

    def project(self, pixels):
        """The patch embedding of patches (h * w, p * p * 3)."""
        kernel = self.weights["embeds.proj.weight"]
        if self.kernel:
            side = int((kernel.shape[1] / 3) ** 0.5)
            kernel = self.kernel(kernel.reshape(-1, side, side, 3)).reshape(kernel.shape)
        return np.asarray(pixels, np.float64) @ kernel.T + self.weights["embeds.proj.bias"]

    def __call__(self, grid, pixels):
        """All stages of one picture, in float32, without padding."""
        h, w = map(int, grid)
        count = h * w
        projected = self.project(pixels)
        position = self.position(self.weights["embeds.pos_embed"][0], h, w)
        bias = self.weights["embeds.proj.bias"]
        if self.padded_as_in == "transformers":
            bias = bias + position[0]
        x = np.concatenate([projected + position, np.tile(bias, (self.length - count, 1))])
        stages = {"patch_embedding": projected, "position_embedding": x[:count]}
        valid = np.arange(self.length) < count
        allowed = np.tile(valid, (self.length, 1))
        if self.padded_as_in == "timm":
            allowed = allowed & valid[:, None]
        if not self.masks:
            allowed = np.ones_like(allowed)
        if self.causal:
            # Padding is not masked besides: nothing that is valid stands behind it.
            allowed = np.tril(np.ones((self.length, self.length), bool))
        depth = sum(name.endswith("norm1.weight") for name in self.weights)
        for place, number in enumerate(self.blocks or range(depth)):
            if number is not None:
                x = self.run_block(x, number, allowed)
            stages[f"block_{place}"] = x[:count]
        x = self.norm(x, "norm") if self.last_norm else x
        stages["norm"] = x[:count]
        stages["pooled"] = self.pooled(x, valid)
        found = {stage: np.float32(numbers) for stage, numbers in stages.items()}
        return {"grid": np.array(grid), "pixels": np.float32(pixels)} | found
