"""``vit-ports identify`` says which convention a port followed, and what it should have."""

import re
import zipfile

import numpy as np
import pytest
from on_the_kit import random_table, tokens_of

from vit_ports.cli.main import main
from vit_ports.families import FAMILIES

# (t, h, w): in blocks of one token alone, so few conventions are tried
SIZES = [(1, 5, 7), (2, 9, 3)]
CHANNELS = 8


@pytest.fixture
def identify(tmp_path, capsys):
    """The command's exit status and what it prints, about files of a port's arrays."""
    first = tmp_path / "result.npy"
    rest = tmp_path / "rest.npz"
    table = random_table(6, CHANNELS, (9, 9))
    np.savez(rest, table=table, sizes=SIZES)
    convention = FAMILIES["siglip2"]

    def identify(change, *options):
        np.save(first, change(tokens_of(convention, table, SIZES)))
        code = main(["identify", str(first), str(rest), *options])
        out, err = capsys.readouterr()
        return code, out + err

    return identify


def test_the_reference_is_equal_and_half_precision_is_said(identify):
    code, said = identify(lambda x: x.float())
    assert code == 0 and said.startswith("equal to the reference, within the rounding of float32")
    assert identify(lambda x: x.half().float())[0] == 1
    assert identify(lambda x: x.half().float(), "--precision", "float16")[0] == 0


def test_a_multiple_is_no_rounding_and_noise_is_no_precision(identify):
    for options in ((), ("--precision", "bfloat16")):
        code, said = identify(lambda x: (1.02 * x).bfloat16().float(), *options)
        assert code == 1 and re.match(r"1.0[12]\d* times what the reference gives", said)
    code, said = identify(lambda x: -3 * x.flip(0))
    assert code == 1 and said.startswith("none of the known ones: the nearest is not within")
    assert "--precision" not in said and "are as near" not in said


def test_an_archive_that_unpacks_to_gigabytes_is_refused(identify, tmp_path):
    with zipfile.ZipFile(tmp_path / "rest.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("table.npy", "w") as opened:
            for _ in range(65):
                opened.write(bytes(2**24))
    code, said = identify(lambda x: x)
    assert code == 2 and "unpacked it has more than 1,073,741,824 bytes" in said


def test_what_cannot_be_compared_is_told(identify, tmp_path):
    code, said = identify(lambda x: x, "--family", "ovis2.5")
    assert code == 2 and "sizes must be multiples of the reference's merge, 2" in said
    (tmp_path / "rest.npz").write_bytes(b"PK\x03\x04")
    code, said = identify(lambda x: x)
    assert code == 2 and "rest.npz is no whole file of arrays" in said
