"""Stage that writes the atlas: corpus and questions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from experiments.worlds.atlas.facts import Atlas, load_atlas
from experiments.worlds.atlas.passages import all_passages
from experiments.worlds.atlas.questions import Place, as_task, draw_chains, phrase
from experiments.worlds.corpus import Passage, write_corpus
from experiments.worlds.world_task import write_splits
from rollout.trajectory import Task

SHARES = {"train": 0.6, "val": 0.15, "test": 0.25}  # of the countries


class BuildAtlas:
    """Writes a search corpus and question files of real geographic facts. They are ``corpus.jsonl`` and
    ``{demonstrations,train,val,test}.parquet``. Deterministic.

    Countries are divided among training (also the demonstrations), validation and test, with their cities. A question
    starts at a place of its split; no training question passes through a country of another split, and no validation
    question through a country of the test.

    Args:
        seed: seed of the division and the questions.
        cities_per_country: the largest cities with a unique name.
        hop_shares: weights of one-, two- and three-hop questions.
        demonstrations: number of questions for the expert.
        train: number of training questions.
        val: number of validation questions.
        test: number of test questions.
    """

    def __init__(
        self,
        seed: NonNegativeInt = 0,
        cities_per_country: PositiveInt = 12,
        hop_shares: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.2, 0.4, 0.4),
        demonstrations: PositiveInt = 400,
        train: PositiveInt = 2000,
        val: PositiveInt = 100,
        test: PositiveInt = 300,
    ) -> None:
        self.seed, self.cities_per_country, self.hop_shares = seed, cities_per_country, hop_shares
        self.sizes = {"test": test, "val": val, "train": train, "demonstrations": demonstrations}

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the corpus and the question files to ``output_dir``, and return the numbers of passages, places and
        questions.
        """
        atlas = load_atlas(self.cities_per_country)
        corpus = all_passages(atlas)
        write_corpus(output_dir / "corpus.jsonl", corpus)
        figures = {
            "passages": len(corpus),
            "countries": len(atlas.countries),
            "cities": len(atlas.cities),
            "aliases": sum(bool(city.alias) for city in atlas.cities),
            "namesakes": len(atlas.namesakes),
        }
        return figures | write_splits(output_dir, self._splits(atlas, {passage.id: passage for passage in corpus}))

    def _splits(self, atlas: Atlas, corpus: dict[str, Passage]) -> dict[str, list[Task]]:
        rng = random.Random(f"atlas:{self.seed}")
        codes = self._divided(atlas, rng)
        taken: set[object] = set()
        splits = {}
        for name, count in self.sizes.items():
            own = codes["train" if name == "demonstrations" else name]
            avoid = {"test": set(), "val": codes["test"]}.get(name, codes["test"] | codes["val"])
            subjects: list[Place] = [atlas.countries[code] for code in sorted(own)]
            subjects += [city for city in atlas.cities if city.country in own]
            chains = draw_chains(atlas, subjects, self.hop_shares, count, rng, avoid, taken)
            splits[name] = [
                as_task(atlas, chain, phrase(chain, rng), f"{name}-{i}", corpus) for i, chain in enumerate(chains)
            ]
        return splits

    @staticmethod
    def _divided(atlas: Atlas, rng: random.Random) -> dict[str, set[str]]:
        """Divide the countries among training, validation and test, and return the country codes of each."""
        codes = sorted(atlas.countries)
        rng.shuffle(codes)
        divided, start = {}, 0
        for name, share in SHARES.items():
            end = len(codes) if name == "test" else start + round(share * len(codes))
            divided[name], start = set(codes[start:end]), end
        return divided
