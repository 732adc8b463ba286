"""``naflex-fast drift --against transformers`` from end to end, on weights as transformers saves
them."""

import json

import pytest

from tests.support import tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.names import STRATEGY_NAMES

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

MODEL = ["--model", f"{tiny_siglip2.FAMILY}.v2_webli"]
RECOGNISED = "weights: file model.safetensors.index.json"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip2")
    tiny_siglip2.whole_model().save_pretrained(folder, max_shard_size="200KB")
    return str(folder)


@pytest.fixture
def drift(weights, photos, tmp_path, capsys):
    """The status of ``drift --against``, what it prints, and its figures."""

    def drift(*options):
        file = tmp_path / "figures.json"
        given = ["drift", *MODEL, "--checkpoint", weights, "--images", str(photos), *options]
        given += ["--max-seq-len", "64", "--against", "transformers", "--json", str(file)]
        status = cli.main(given)
        return status, capsys.readouterr().out, json.loads(file.read_text())["against"]

    return drift


@ran(*STRATEGY_NAMES)
def test_the_report_names_the_first_stage_and_the_likely_reason(drift):
    status, printed, against = drift()
    assert status == 1  # timm parts
    assert RECOGNISED in printed
    assert against["first"] == "pixels"
    assert against["reason"]["words"] == "pictures resized by bicubic"
    assert all(line in printed for line in against["verdict"])


@ran("matmul")
@pytest.mark.parametrize("mend", ["--interpolation bilinear", "--stage-from patches"])
def test_what_mends_it_mends_it(mend, drift):
    status, printed, against = drift("--modes", "matmul", *mend.split())
    assert status == 0
    assert "equal within float32's rounding, on 4 pictures" in printed
    assert against["first"] is None
    assert list(against["modes"]) == ["matmul"]
    shares = {row["stage"]: row["share"] for row in against["stages"]}
    # The processor itself was asked, not timm's transform twice: it rounds pixels otherwise.
    assert (shares["pixels"] > 0) == ("bilinear" in mend)
