"""Each known mistake is found in a port that makes it: at its stage, with its words.

The port is that of ``examples/`` with a wrong line (``tests/support/broken_port.py``).
"""

import numpy as np
import pytest
import torch

from tests.support import broken_port, tiny_recordings
from timm_naflex_fast.commands.recordings import mistakes
from timm_naflex_fast.commands.recordings.mistakes import mistakes_of

NOT_SHOWN = {
    # What the reference itself does.
    "bilinear",
    "tanh_gelu",
    # No picture of the tiny recording has a grid of one column; that of a test below has.
    "interpolate_unbatched",
    # What the head's LayerNorm takes is too large there; a test below makes it small.
    "pooling_eps_1e-5",
}


@pytest.fixture(scope="module")
def model():
    model, _ = tiny_recordings.reference()
    return model


@pytest.fixture(scope="module")
def reference():
    _, recording = tiny_recordings.reference()
    return recording


@pytest.fixture(scope="module")
def pictures():
    return tiny_recordings.smooth_pictures()


@pytest.fixture(scope="module")
def run(model, reference, pictures):
    """The function that runs a port with these mistakes, from pictures or from pixels."""
    weights = broken_port.weights_of(model)

    def run(*names):
        is_read = any(map(broken_port.is_read, names))
        ports = broken_port.run(reference, weights, pictures if is_read else None, names)
        return ports

    return run


def entry_of(reference, name):
    """What recording.json says of a mistake."""
    (found,) = [one for one in reference.about["mistakes"] if one["name"] == name]
    return found


def words_of(reference, name, stage, picture):
    """The words of a mistake, and of those that give the same numbers at a stage."""
    key = f"{picture:03}.{stage}"
    right = reference.mistakes[f"{name}/{key}"]
    words = set()
    for one in reference.about["mistakes"]:
        numbers = reference.mistakes.get(f"{one['name']}/{key}")
        if numbers is None or numbers.shape != right.shape:
            continue
        if np.abs(numbers - right).max() <= 1e-4 * np.abs(right).max():
            words.add(one["words"])
    return words


ABOUT_PADDING = {
    f"{name}{how}"
    for name in ("padding_not_masked", "mean_of_padding_too", "pooling_not_masked")
    for how in ("", "_in_transformers", "_twice")
}


def test_each_mistake_of_the_list_has_a_wrong_line(model):
    every = {mistake.name for mistake in mistakes_of(model)}
    assert every == {*broken_port.MISTAKES, *NOT_SHOWN, *ABOUT_PADDING}


def test_each_mistake_shows_in_the_recording(reference):
    shown = {one["name"] for one in reference.about["mistakes"]}
    assert shown == {*broken_port.MISTAKES, *ABOUT_PADDING}


@pytest.mark.parametrize("name", broken_port.MISTAKES)
def test_a_port_with_a_mistake_is_told_so(name, run, reference):
    ports = run(name)
    entry = entry_of(reference, name)
    found = tiny_recordings.compared(reference, ports)
    assert found.first.stage == found.reason.stage == entry["stage"]
    assert found.reason.known, found.reason.words
    assert found.reason.words in words_of(reference, name, entry["stage"], found.reason.picture)

    # From the right pixels the pooled output alone is enough.
    if not broken_port.is_read(name):
        alone = [{"pooled": port["pooled"]} for port in ports]
        reason = tiny_recordings.compared(reference, alone).reason
        assert reason.stage == "pooled"
        assert reason.known, reason.words
        assert reason.words in words_of(reference, name, "pooled", reason.picture)


def keep_mistakes(monkeypatch, names):
    """No others are tried."""
    for where, entries in mistakes.MISTAKES.items():
        kept = [entry for entry in entries if entry[0] in names]
        monkeypatch.setitem(mistakes.MISTAKES, where, kept)


def test_one_entry_adds_a_mistake(monkeypatch, pictures):
    keep_mistakes(monkeypatch, set())
    entry = ("doubled", "the last LayerNorm is doubled", lambda norm, run, x, mask: 2 * run(x))
    monkeypatch.setitem(mistakes.MISTAKES, "norm", [entry])
    recording = tiny_recordings.recording_of(tiny_recordings.tiny_model(depth=1), pictures[:1])
    (own,) = recording.stages
    reason = tiny_recordings.compared(recording, [own | {"norm": 2 * own["norm"]}]).reason
    assert (reason.stage, reason.words) == ("norm", "the last LayerNorm is doubled")


def test_without_padding_no_mistake_about_it_is_recorded(monkeypatch, model):
    keep_mistakes(monkeypatch, {"mean_of_padding_too", "mean_pooled"})
    full = tiny_recordings.smooth_pictures([(160, 160)])
    recording = tiny_recordings.recording_of(model, full)
    assert len(recording.stages[0]["pixels"]) == tiny_recordings.LENGTH
    names = {one["name"] for one in recording.about["mistakes"]}
    assert "mean_pooled" in names
    assert not [name for name in names if name.startswith("mean_of_padding_too")]


# Ports without a mistake.


@pytest.fixture(scope="module")
def timms(model, reference):
    """Function: the stages that timm's tower of this dtype gives from the recorded pixels."""
    import copy

    from timm_naflex_fast.commands.measure.pipelines import stages_of
    from timm_naflex_fast.commands.measure.record import inputs_of

    def timms(dtype):
        tower = tiny_recordings.source_of(copy.deepcopy(model).to(dtype)).pipeline.tower
        inputs = inputs_of(reference.stages, tiny_recordings.LENGTH)
        return stages_of(inputs, tower(inputs))

    return timms


@pytest.mark.parametrize("kept", ["all stages", "tower's stages", "pooled alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_right_port_is_equal_in_its_precision(dtype, kept, timms, reference):
    ports = timms(dtype)
    if kept == "pooled alone":
        ports = [{"pooled": port["pooled"]} for port in ports]
    if kept == "tower's stages":
        for port in ports:
            del port["grid"], port["pixels"]
    found = tiny_recordings.compared(reference, ports, str(dtype).removeprefix("torch."))
    assert found.first is None and found.reason is None


def test_three_mistakes_are_named_one_after_the_other(run, reference):
    names = ["bgr", "table_transposed", "swapped_norms"]
    told = []
    while names:
        reason = tiny_recordings.compared(reference, run(*names)).reason
        told.append((reason.stage, reason.words))
        names.pop(0)
    assert told == [
        ("pixels", "colours in the order blue, green, red"),
        ("position_embedding", "the table is read transposed"),
        ("block_0", "the two LayerNorms of a block are exchanged"),
    ]
    assert tiny_recordings.compared(reference, run()).first is None


def test_the_eps_of_the_head_is_told_where_its_tokens_are_small(monkeypatch, pictures):
    keep_mistakes(monkeypatch, {"eps_1e-5", "pooling_eps_1e-5"})
    model = tiny_recordings.tiny_model(depth=1)
    for parameter in model.attn_pool.proj.parameters():
        parameter.data *= 1e-3
    recording = tiny_recordings.recording_of(model, pictures[:1])
    weights = broken_port.weights_of(model)
    wrong = broken_port.run(recording, weights, mistakes=["eps_1e-5"])
    right = [{**own, "pooled": one["pooled"]} for own, one in zip(recording.stages, wrong)]
    reason = tiny_recordings.compared(recording, right).reason
    assert reason.stage == "pooled"


@pytest.mark.parametrize("mode", ["timm", "transformers", "twice"])
def test_padding_that_is_not_masked_is_told(mode, model, reference):
    """By the numbers that the recording holds: a port of one picture at a time has no padding."""
    name = "padding_not_masked" + {"timm": ""}.get(mode, f"_{mode}".replace("_tr", "_in_tr"))
    entry = entry_of(reference, name)
    ports = [{} for _ in reference.stages]
    key = f"{name}/{entry['picture']:03}.{entry['stage']}"
    ports[entry["picture"]] = {entry["stage"]: reference.mistakes[key]}
    reason = tiny_recordings.compared(reference, ports).reason
    assert reason.known and reason.words == entry["words"]
