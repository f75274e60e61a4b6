"""Documents to tokens to batches, with numpy alone: this package never imports torch."""

from trimtab.data.index import ShardWriter, TokenShard, check_vocabulary
from trimtab.data.loader import Batch, BatchStream, Loader, validation_batches
from trimtab.data.prepare import Corpus, open_corpus, prepare_corpus
from trimtab.data.sources import Document, iter_documents
from trimtab.data.tokenize import Tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "Corpus",
    "Document",
    "Loader",
    "ShardWriter",
    "TokenShard",
    "Tokenizer",
    "check_vocabulary",
    "iter_documents",
    "open_corpus",
    "prepare_corpus",
    "validation_batches",
]
