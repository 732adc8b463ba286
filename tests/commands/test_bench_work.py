"""The bench's material: workloads against their description, folders of images, and what a timed step does."""

import math
from contextlib import ExitStack
from itertools import cycle

import numpy as np
import pytest
import torch
from oracles import NEW_TIMM, STOCK, is_pristine
from PIL import Image
from timm.data import create_transform

from timm_naflex_fast import status
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import pos_embed, workloads
from timm_naflex_fast.measure.bench.meters import peak_memory
from timm_naflex_fast.measure.bench.race import PLAIN_ADD, Contender, run
from timm_naflex_fast.measure.bench.workloads import (
    PHOTO_ASPECTS,
    WORKLOADS,
    coordinates,
    fit,
    folder_workload,
    read_sizes,
)
from timm_naflex_fast.measure.contenders import LEARNED, OURS, use


def test_the_six_workloads():
    tables = {name: workload.options for name, workload in WORKLOADS.items()}
    assert tables == {
        "single": "16x16 bilinear",
        "imagenet": "16x16 bicubic",
        "siglip": "16x16 bilinear",
        "diverse": "32x32 bicubic",
        "extreme": "16x16 bicubic",
        "radio": "128x128 bilinear antialias off align_corners ar_preserving",
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_grids_are_seeded_and_a_small_batch_begins_a_large_one(name):
    workload = WORKLOADS[name]
    assert workload.grids(40) == workload.grids(40) == workload.grids(60)[:40]
    assert workload.grids(1) == workload.grids(2)[:1] and len(workload.grids(60)) == 60
    assert name == "single" or workload.grids(40, seed=1) != workload.grids(40)


def test_single_and_uniform_grids():
    assert set(WORKLOADS["single"].grids(20)) == {(24, 24)}
    for name, low, high in (("diverse", 4, 31), ("radio", 16, 48)):
        grids = np.array(WORKLOADS[name].grids(1500))
        for sides in grids.T:
            assert set(sides) == set(range(low, high + 1)) and abs(sides.mean() - (low + high) / 2) < 1
        assert abs(np.corrcoef(grids.T)[0, 1]) < 0.1


def test_imagenet_grids_are_twelve_and_zipf_distributed():
    grids = WORKLOADS["imagenet"].grids(6000)
    counts = sorted((grids.count(grid) for grid in set(grids)), reverse=True)
    assert len(counts) == len(PHOTO_ASPECTS) == 12
    assert max(h * w for h, w in grids) <= 576 and min(h * w for h, w in grids) > 480
    harmonic = sum(1 / rank for rank in range(1, 13))
    expected = [6000 / rank / harmonic for rank in range(1, 13)]
    assert all(abs(found - want) < 5 * math.sqrt(want) for found, want in zip(counts, expected))


def test_siglip_grids_are_as_large_as_fits():
    grids = WORKLOADS["siglip"].grids(1000)
    assert all(h * w <= 256 for h, w in grids)
    # One more row and column never fits, and aspects fill [1/3, 3] evenly in the logarithm.
    assert all((h + 1) * (w + 1) > 256 for h, w in grids)
    logs = np.array([math.log(w / h, 3) for h, w in grids])
    assert logs.min() > -1.15 and logs.max() < 1.15 and abs(logs.mean()) < 0.1
    shares = np.histogram(logs, [-1.15, -1 / 3, 1 / 3, 1.15])[0] / len(logs)
    assert np.abs(shares - 1 / 3).max() < 0.08


def test_extreme_grids_are_thin():
    grids = WORKLOADS["extreme"].grids(1000)
    assert all(min(grid) <= 4 and max(grid) <= 576 for grid in grids)
    assert {(2, 288), (288, 2), (3, 190), (190, 3)} <= set(grids)
    lines = [max(grid) for grid in grids if min(grid) == 1]
    assert len(set(lines)) > 50 and {1, -1} == {np.sign(h - w) for h, w in grids if min(h, w) == 1 < max(h, w)}


def test_coordinates_are_those_of_the_collator():
    coord = coordinates([(2, 3), (1, 2)])
    assert coord.tolist() == [[[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]], [[0, 0], [0, 1], *[[0, 0]] * 4]]


@pytest.mark.skipif(NEW_TIMM, reason="this timm has the options")
def test_old_timm_cannot_have_a_radio_table(capsys):
    with pytest.raises(ValueError, match=r"'radio' cannot run: timm 1.0.16 has no pos_embed_antialias"):
        WORKLOADS["radio"].embeds(8)
    assert cli.main(["bench", "--workload", "radio"]) == 2


def small(**options):
    """One race on the diverse workload, and the generator that keeps it ready."""
    made = pos_embed.races([WORKLOADS["diverse"]], [3], channels=4, **options)
    return next(made), made


GRIDS = [(5, 7), (4, 4), (9, 31)]


@pytest.mark.ran
@pytest.mark.parametrize("name", [name for name in pos_embed.CONTENDERS if name != PLAIN_ADD])
def test_a_training_step_is_forward_and_backward_of_the_step_alone(name, monkeypatch):
    monkeypatch.setattr(pos_embed, "MOST_BYTES", math.inf)
    found, _made = small(phases=["train"], contenders=[name])
    if not found.contenders:
        pytest.skip(found.about["left_out"][name])
    (contender,) = found.contenders
    seen = []
    for _ in range(2):  # the first leaves a gradient behind, which the second must not add to
        given = contender.prepare()
        assert not given.is_leaf
        given.register_hook(lambda grad: seen.append(grad.clone()))
        contender.run(given)
    assert len(seen) == 2 and torch.equal(*seen) and bool(seen[0].any())


@pytest.mark.ran
@pytest.mark.parametrize("name", ["stock", "timm-flag-bilinear", "interpolate_cached", "grid_sample", "matmul"])
def test_a_training_steps_result_and_gradient_are_timms(name):
    workload, coord = WORKLOADS["diverse"], coordinates(GRIDS)
    embeds, reference = workload.embeds(4), workload.embeds(4)
    x, g = torch.randn(*coord.shape[:2], 4), torch.randn(*coord.shape[:2], 4)
    values = [torch.randn(1, 32, 32, 4) for _ in range(2)]
    want = x.clone()
    method = STOCK[LEARNED + "_grid_sample" * (name in ("timm-flag-bilinear", "grid_sample"))]
    if name == "timm-flag-bilinear":
        reference.pos_embed_interp_mode = "bilinear"
    with ExitStack() as on:
        on.enter_context(use(name, embeds))
        contender = pos_embed._contender(name, embeds, coord, x, g, cycle(values), on)
        for value in values:
            given = contender.prepare()
            assert given.data_ptr() == x.data_ptr() and embeds.pos_embed.grad is None
            contender.run(given)
            assert torch.equal(embeds.pos_embed.detach(), value)
            reference.pos_embed.data.copy_(value)
            reference.pos_embed.grad = None
            want = want.detach().requires_grad_().clone()
            method(reference, want, coord)
            want.backward(g)
    torch.testing.assert_close(x, want.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(embeds.pos_embed.grad, reference.pos_embed.grad, atol=1e-4, rtol=1e-5)


def test_the_plain_add_touches_x():
    found, _made = small(phases=["infer"], contenders=[PLAIN_ADD, "stock"])
    plain, stock = found.contenders
    x = stock.prepare()
    before = x.clone()
    plain.run(plain.prepare())
    assert bool((x != before).all())


@pytest.mark.ran("matmul")
def test_infer_changes_the_table_and_frozen_does_not():
    for phase, same in (("infer", False), ("frozen", True)):
        found, _made = small(phases=[phase], contenders=["matmul"])
        (contender,) = found.contenders
        steps = []
        for _ in range(2):
            x = contender.prepare()
            assert not x.requires_grad
            before = x.clone()
            contender.run(x)
            steps.append(x - before)
        assert torch.allclose(*steps, atol=1e-5) is same


@pytest.mark.parametrize("phase", pos_embed.PHASES)
def test_a_race_that_is_over_does_not_time_timm_under_our_name(phase):
    found, made = small(phases=[phase], contenders=["matmul", "stock"])
    made.close()
    with pytest.raises(RuntimeError, match="this race is over"):
        run(found, 1)


def test_every_contender_has_the_same_x_and_its_own_choice():
    made = pos_embed.races([WORKLOADS["siglip"]], [2], ["bfloat16"], ["infer"], channels=4)
    found = next(made)
    assert [c.name for c in found.contenders] == [n for n in pos_embed.CONTENDERS if n not in found.about["left_out"]]
    assert {flags.pos_embed for flags in status().models} == {"stock", *OURS}
    xs = [c.prepare() for c in found.contenders if c.name != PLAIN_ADD]
    assert all(x is xs[0] for x in xs) and xs[0].dtype == torch.bfloat16
    grids = WORKLOADS["siglip"].grids(2)
    assert found.about["tokens"] == sum(h * w for h, w in grids)
    assert found.about["x_bytes"] == 2 * max(h * w for h, w in grids) * 4 * 2
    del found
    assert next(made, None) is None
    assert status().models == () and is_pristine()


def test_what_does_not_fit_in_memory_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(pos_embed, "MOST_BYTES", 4 * 3 * 4 * 32 * 32 - 1)
    found, _made = small(phases=["train"], contenders=["stock", "timm-flag-bilinear", "issue-2514-zeros"])
    assert [c.name for c in found.contenders] == ["stock"]
    assert all("its backward needs" in why for why in found.about["left_out"].values())
    assert len(small(phases=["infer"], contenders=["stock", "grid_sample"])[0].contenders) == 2


@pytest.mark.parametrize("phase", pos_embed.PHASES)
def test_peak_memory_on_cpu(phase):
    def hold(size):
        kept = torch.ones(size)
        del kept
        return torch.zeros(size // 2).sum()

    peak = peak_memory(torch.device("cpu"))(Contender("a", lambda _: hold(10**6)))
    assert 4e6 <= peak < 4.5e6
    found, _made = small(phases=[phase], contenders=[PLAIN_ADD, "stock"])
    rows = run(found, 1, peak_memory=peak_memory(torch.device("cpu")))
    assert rows[0].peak_bytes < rows[1].peak_bytes


@pytest.mark.parametrize(("length", "patch"), [(256, 16), (100, 14), (37, 8)])
def test_folder_grids_are_those_of_timms_pipeline(photos, length, patch):
    transform = create_transform(
        (3, 64, 64), naflex=True, patch_size=patch, max_seq_len=length, patchify=True, interpolation="bicubic"
    )
    want = []
    for path in sorted(p for p in photos.rglob("*") if p.is_file()):
        coord = transform(Image.open(path).convert("RGB"))["patch_coord"]
        want.append(tuple((coord.amax(0) + 1).tolist()))
    assert read_sizes(photos, length, patch) == (want, []) and len(set(want)) == 4


def test_only_headers_are_read(photos, monkeypatch):
    whole = (photos / "a.jpg").read_bytes()
    (photos / "cut.jpg").write_bytes(whole[: len(whole) // 4])
    with pytest.raises(OSError, match="truncated"):
        Image.open(photos / "cut.jpg").load()
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    grids, _ = read_sizes(photos)
    assert len(grids) == 5 and grids[0] == grids[2] == fit(300, 400, 256)


def test_unreadable_files_are_listed(photos, monkeypatch):
    def cannot(height, width, tokens, patch):  # as some releases of timm with a picture like a line
        if width == 20000:
            raise ValueError("no such size")
        return fit(height, width, tokens, patch)

    monkeypatch.setattr(workloads, "fit", cannot)
    (photos / "text.jpg").write_text("no image")
    (photos / "more" / "none.png").write_bytes(b"")
    Image.fromarray(np.zeros((1, 20000, 3), np.uint8)).save(photos / "line.png")
    (photos / "notes.txt").write_text("not even looked at")
    grids, unreadable = read_sizes(photos, 4)
    assert len(grids) == 4
    assert sorted(line.split(":")[0] for line in unreadable) == ["line.png", "more/none.png", "text.jpg"]


@pytest.mark.parametrize("what", ["missing", "empty", "unreadable"])
def test_folders_without_images(what, tmp_path, capsys):
    folder = tmp_path / "folder"
    if what != "missing":
        folder.mkdir()
    if what == "unreadable":
        (folder / "a.jpg").write_text("no")
    assert cli.main(["bench", "--sizes-from", str(folder)]) == 2
    message = {"missing": "is not a folder", "empty": "looked for .jpg", "unreadable": "can be read: a.jpg"}[what]
    assert message in capsys.readouterr().err


def test_batches_of_a_folder_take_each_image_before_any_again():
    images = [(1, n) for n in range(1, 11)]
    workload = folder_workload("somewhere/photos", images, WORKLOADS["diverse"])
    assert (workload.name, workload.table, workload.mode) == ("photos", (32, 32), "bicubic")
    grids = workload.grids(25)
    assert sorted(grids[:10]) == sorted(grids[10:20]) == images and grids[:10] != images
    assert workload.grids(25) == grids and len(set(grids[20:])) == 5
