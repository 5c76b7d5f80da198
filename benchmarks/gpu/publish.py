"""Put results of a GPU into docs/: python benchmarks/gpu/publish.py FOLDER ...

Stages of each FOLDER's gpu.json take the place of those in docs/gpu.json, later ones that of earlier ones;
both pages with such figures are made anew.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
sys.path.append(str(HERE.parent / "paper"))
import _evaluation
import _on_gpu
import page


def main() -> None:
    """Merge results and write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="with the gpu.json of a run")
    options = parser.parse_args()
    stages = _on_gpu.stages()
    for folder in options.folders:
        stages |= _on_gpu.stages(folder / _on_gpu.FILE.name)
    if _on_gpu.is_rehearsal(stages):
        parser.error("results of a rehearsal, on a processor or quick, do not belong on the pages")
    if stages:
        _on_gpu.FILE.write_text(json.dumps({"schema": _on_gpu.SCHEMA, "stages": stages}, indent=1) + "\n")
    for one in (page.PAGE, _evaluation.PAGE):
        results = _on_gpu.FILE.with_name(f"{one.name}.json")
        results.with_suffix(".md").write_text(one.text(one.read(results)))


if __name__ == "__main__":
    main()
