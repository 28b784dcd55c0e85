"""Commands: ``python -m retrieval build`` builds an index folder, ``... serve`` is ``python -m retrieval.server``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser

from retrieval.index import BuildIndex
from retrieval.types import RetrievalFailure


def _build(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m retrieval build", description="Build OUTPUT/index from a corpus.")
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_class_arguments(BuildIndex)
    options = parser.instantiate(parser.parse_args(arguments))
    output = options.pop("output")
    options.pop("config")
    try:
        print(json.dumps(BuildIndex(**options).run(output), indent=1))
    except (RetrievalFailure, ValueError, OSError) as error:
        sys.exit(f"index: {error}")
    except KeyboardInterrupt:
        again = "continues after the encoded vectors" if options["encoder"] else "starts from the beginning"
        sys.exit(f"index: interrupted; {output}/index is unchanged. The same command {again}")


def main() -> None:
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "build":
        _build(arguments)
    elif command == "serve":
        from retrieval.server import main as serve

        serve(arguments)
    else:
        sys.exit(f"python -m retrieval build|serve [options]; found {command!r}")


if __name__ == "__main__":
    main()
