"""Stage that writes a pretrained model as a Hugging Face folder in float32, from a GGUF file or from the hub.

Source of the pre-tokenizer names: ``llama-vocab.cpp`` of llama.cpp, which writes GGUF files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.digests import write_digests

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Pre-tokenizers that split all digits, then GPT-2's way. transformers 5.19 reads them as GPT-2's.
SPLIT_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
SAMPLE = "In 1984, 12345 people\n\n  spoke: «naïve» 東京 🎉 it's </tag>"


class PretrainedModel:
    """Task that writes a pretrained model and its tokenizer to ``<output_dir>/model``: float32 weights, licence,
    digests.

    Args:
        source: a GGUF file; ``PACKAGE:FILE.gguf``, a GGUF file inside an installed package; or a Hugging Face folder or
            hub name, ``owner/name`` or ``owner/name@revision``, which is downloaded.

    Raises:
        ValueError: no such file or package, or a GGUF tokenizer whose pre-tokenizer is unknown here.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        package, _, name = source.partition(":")
        self.package = package if name.endswith(".gguf") else None
        self.file = self._in_package(package, name) if self.package else Path(source)
        if self.file.suffix == ".gguf" and not self.file.is_file():
            raise ValueError(f"source is {source!r}, and there is no file {self.file}; expected a .gguf file")

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the model folder. Return the number of parameters and of tokens, and the licence if the file or package
        has one."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        folder = output_dir / "model"
        disable_progress_bar()  # it would fill the log
        if self.file.suffix == ".gguf":
            model, tokenizer = _read_gguf(self.file)
        else:
            name, _, revision = (self.source, "", "") if self.file.exists() else self.source.partition("@")
            origin = {"revision": revision} if revision else {}
            tokenizer = AutoTokenizer.from_pretrained(name, **origin)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **origin)
        rows: int = model.get_input_embeddings().get_parameter("weight").shape[0]
        if len(tokenizer) > rows:
            raise ValueError(
                f"the tokenizer of {self.source!r} has {len(tokenizer)} tokens, and the model {rows}; expected no more "
                "tokens than that. Take the model's Hugging Face folder instead"
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder)
        ids = reloaded(SAMPLE, add_special_tokens=False).input_ids
        if ids != tokenizer(SAMPLE, add_special_tokens=False).input_ids or reloaded.decode(ids) != SAMPLE:
            raise ValueError(f"the tokenizer of {self.source!r} does not return the text that it is given: {SAMPLE!r}")
        report = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)} | self._write_licence(folder)
        write_digests(folder)
        return report

    def _in_package(self, package: str, name: str) -> Path:
        """Return the path of a file in an installed package, without importing the package."""
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"source is {self.source!r}, but the package {package} is not installed; run: make setup")
        return Path(spec.submodule_search_locations[0], name)

    def _write_licence(self, folder: Path) -> dict[str, str]:
        """Copy the licence files of the model's package into the model folder, and return the licence's name; {}
        without a package."""
        if self.package is None:
            return {}
        distribution = importlib.metadata.distribution(self.package.replace("_", "-"))
        for path in distribution.files or ():
            if re.fullmatch(r"(?i)licen[cs]e.*|copying.*", path.name):
                shutil.copyfile(str(distribution.locate_file(path)), folder / path.name)
        about = distribution.metadata.json
        return {"licence": str(about.get("license_expression") or about.get("license") or "unknown")}


def _read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer in a GGUF file. Its quantised weights become float32.

    Raises:
        ValueError: the file is not a GGUF file, or names a pre-tokenizer that transformers would replace by another.
    """
    import torch
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    fields = GGUFReader(file).fields
    read = {key: fields[key].contents() for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre") if key in fields}
    kind, split = read.get("tokenizer.ggml.model"), read.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "gpt2" and split not in SPLIT_DIGITS | GPT2 | set(GGUF_PRE_TOKENIZER_SPLITS):
        known = ", ".join(sorted(SPLIT_DIGITS | GPT2 | set(GGUF_PRE_TOKENIZER_SPLITS)))
        raise ValueError(
            f"the tokenizer of {file} splits text as {split!r}, and transformers would split it in another way; "
            f"expected one of {known}. Take the model's Hugging Face folder instead"
        )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if kind == "gpt2" and split in SPLIT_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = type(quantised.config)(
        **{
            key: value
            for key, value in quantised.config.to_dict().items()
            if key not in ("quantization_config", "_name_or_path", "transformers_version")
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one that `save_pretrained` accepts
    model.load_state_dict(quantised.state_dict())
    tokenizer.model_max_length = config.max_position_embeddings
    return model, tokenizer
