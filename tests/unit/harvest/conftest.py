"""A tiny model with a tokenizer, and one harvest of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from interp_core import Harvest, InterpModel, load_model
from interp_core.testing.tiny import write_family
from tests.unit.harvest.settings import POINTS, QUIET, ROWS

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that puts a first token before a text."""
    folder = write_family("llama", tmp_path_factory.mktemp("harvest"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>"])
    tokenizer.train_from_iterator(["the capital of france"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[InterpModel]:
    with load_model(str(folder), "eager", dtype="float32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def held(model: InterpModel, tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return model.harvest(ROWS, POINTS, tmp_path_factory.mktemp("held") / "h", **QUIET)
