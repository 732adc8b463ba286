"""The functions of ``functional``, each linear in the table that it takes."""

import torch

from tests.support.oracles import row_major, seeded
from timm_naflex_fast import functional as fast
from timm_naflex_fast.tracing import is_dtensor

SIZES = [(3, 4), (5, 2), (3, 4)]
COORD = row_major(SIZES, 13)
TABLE = torch.randn(6, 5, 4, generator=seeded(0))


def tokens(table):
    """Zeros that depend on ``table``: a transform allows writing only into what depends on its
    input."""
    zeros = torch.zeros(3, 13, 4)
    return zeros if is_dtensor(table) else 0 * table.sum() + zeros


def by_coordinates(table, **how):
    return fast.add_pos_embed_(tokens(table), table, COORD, **how)


def by_sizes(table, **how):
    return fast.add_pos_embed_(tokens(table), table, grid_sizes=SIZES, **how)


def factorized(table, **how):
    return fast.add_factorized_pos_embed_(tokens(table), table[:, 0], table[0], COORD, **how)


def packed(table, **how):
    return fast.resample_pos_embeds(table, SIZES, mode="bilinear", **how)


def padded(table, **how):
    return fast.resample_pos_embeds(table, [(2, 4)], length=9, merge=2, mode="bicubic", **how)


def one(table, **how):
    return fast.resample_pos_embed(table, (3, 4))


LEARNED = by_coordinates, by_sizes, packed, padded, one
FUNCTIONS = (*LEARNED, factorized)
