"""How a checkpoint folder is written and checked."""

from enum import Enum


class WeightsMode(Enum):
    """How the weights come into a checkpoint folder that is written.

    `copy` shares the bytes with the source where the file system can (reflink) and copies them elsewhere; `link` makes
    absolute symbolic links to the source, so the folder may move and the source must stay; `none` leaves them out.
    """

    copy = "copy"
    link = "link"
    none = "none"


class VerifyLevel(Enum):
    """What `verify` looks at.

    `digest`: weights and tokenizer are the bound ones. `table`: what transformers builds from config.json is the
    regime. `logits`: a plain transformers load answers as the model did under the regime in the search.
    """

    digest = "digest"
    table = "table"
    logits = "logits"
