"""Does an installed vit_ports work alone, without torch, and does it hold what it should?

python ports/tools/smoke_ports.py

It runs the page's port in NumPy on the kit, and compares. It runs under -O too, so nothing here is an
assert.
"""

import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import vit_ports
from vit_ports.towers.siglip2 import SIGLIP2

KIT = Path(__file__).resolve().parents[1] / "kit"
RIGHT = "equal within float32's rounding, on 10 pictures: pooled "
WRONG = "the likely reason: LayerNorm's eps is 1e-5, not 1e-6 "


def said_of(port: Path, folder: str) -> str:
    """What the command says of what a port in NumPy writes."""
    subprocess.run([sys.executable, port, KIT, folder, "--pixels"], check=True, capture_output=True)
    command = shutil.which("vit-ports", path=Path(sys.executable).parent)
    if command is None:
        sys.exit("smoke: the command vit-ports is missing")
    ended = subprocess.run([command, "compare", KIT, folder], capture_output=True, text=True)
    return ended.stdout + ended.stderr


if find_spec("torch") or find_spec("timm"):
    sys.exit("smoke: torch or timm is here, so this does not show that neither is needed")
with tempfile.TemporaryDirectory() as folder:
    faulty = Path(folder, "faulty.py")
    text = SIGLIP2.port.read_text(encoding="utf-8")
    faulty.write_text(text.replace("EPS = 1e-6", "EPS = 1e-5"), encoding="utf-8")
    for port, words in ((SIGLIP2.port, RIGHT), (faulty, WRONG)):
        said = said_of(port, folder)
        if words not in said:
            sys.exit(f"smoke: {words!r} is not in {said}")

package = metadata.distribution("vit_ports")
if package.version != vit_ports.__version__:
    sys.exit(f"smoke: the metadata say {package.version}, the code {vit_ports.__version__}")
for file in package.files or ():
    owner = str(file).split("/")[0]
    if owner not in ("vit_ports", "..") and ".dist-info" not in owner:
        sys.exit(f"smoke: {file} does not belong into the package")
print(f"smoke: vit_ports {package.version} from {vit_ports.__path__[0]} works")
