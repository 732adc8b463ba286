"""Is an installed timm_naflex_fast whole? Needs nothing but the package and its dependencies.

python tools/smoke.py        # also under python -O: nothing here is an assert
"""

import sys

OPTIONAL = ("matplotlib", "rich", "transformers")


def check(holds: bool, what: str) -> None:
    """End with ``what`` unless it holds."""
    if not holds:
        raise SystemExit(f"smoke: {what}")


def main() -> None:
    """Import without the optional packages, compare every mode with timm's own result, run the command's info."""
    for name in OPTIONAL:
        sys.modules[name] = None  # importing it raises ImportError
    import timm
    import torch

    before = set(sys.modules)
    import timm_naflex_fast

    foreign = {name.split(".")[0] for name in set(sys.modules) - before} - {
        "timm_naflex_fast",
        *sys.stdlib_module_names,
    }
    check(not foreign, f"importing timm_naflex_fast imports {sorted(foreign)} beside what timm imports")

    torch.manual_seed(0)
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=64, num_heads=2, num_classes=5)
    torch.nn.init.normal_(model.embeds.pos_embed)
    coord = torch.zeros(3, 24, 2, dtype=torch.long)
    for sample, (h, w) in enumerate([(3, 8), (6, 4), (2, 5)]):
        coord[sample, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    batch = {"patches": torch.randn(3, 24, 768), "patch_coord": coord, "patch_valid": torch.ones(3, 24).bool()}

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(batch)
        out.square().sum().backward()
        return out.detach(), model.embeds.pos_embed.grad.clone()

    want = step()
    for mode in ("matmul", "interpolate_cached", "grid_sample"):
        with timm_naflex_fast.enable(mode):
            got = step()
        close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want))
        check(close == (mode != "grid_sample"), f"{mode} {'equals' if close else 'differs from'} timm's own result")
    check(not timm_naflex_fast.status().replaced, "timm is not as it was")

    from timm_naflex_fast.cli.main import main as command

    check(command(["info"]) == 0, "naflex-fast info fails")
    print(f"smoke: timm_naflex_fast {timm_naflex_fast.__version__} from {timm_naflex_fast.__path__[0]} works")


if __name__ == "__main__":
    main()
