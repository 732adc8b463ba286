import pytest


@pytest.fixture
def identify(tmp_path, capsys):
    """The command's exit status and its line, about a file of these tensors (or a text)."""

    from safetensors.torch import save_file

    from timm_naflex_fast.cli.main import main

    def identify(contents, *options):
        file = tmp_path / "port.safetensors"
        if isinstance(contents, dict):
            save_file(contents, file)
        elif contents is not None:
            file.write_text(contents)
        code = main(["identify", str(file), *options])
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1
        return code, out + err

    return identify
