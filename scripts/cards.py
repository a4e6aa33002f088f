"""Write what reports say of encodings without torch: posbench/encodings/cards.json."""

import json

from posbench import encodings, listing
from posbench.errors import UserError


def written() -> str:
    """Return the text of the file: the card of each encoding at the demo's size."""
    cards = {}
    for name in sorted(encodings.MODULE_OF):
        try:
            encoding = listing.at_demo_size(name)
        except UserError:  # it needs an option
            cards[name] = {}
        else:
            cards[name] = listing.decision_card(encoding)
    lines = [f'  "{name}": {json.dumps(card)}' for name, card in cards.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    listing.CARDS.write_text(written(), encoding="utf-8")
