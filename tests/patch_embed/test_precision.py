"""The dtype of products."""

import torch

from timm_naflex_fast.patch_embed.kernels import product_dtype


def test_products_of_float32_are_exact_whatever_pytorch_is_set_to():
    assert product_dtype(torch.float32) is torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        for lowered in ("high", "medium"):
            torch.set_float32_matmul_precision(lowered)
            assert product_dtype(torch.float32) is torch.float64
            assert product_dtype(torch.bfloat16) is torch.bfloat16 and product_dtype(torch.float64) is torch.float64
    finally:
        torch.set_float32_matmul_precision(before)
    assert product_dtype(torch.float32) is torch.float32


def test_where_pytorch_refuses_to_tell_the_precision_may_be_lowered(monkeypatch):
    def refuse():
        raise RuntimeError("mixed flags")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert product_dtype(torch.float32) is torch.float64
    assert product_dtype(torch.float16) is torch.float16
