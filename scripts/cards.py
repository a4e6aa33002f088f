"""Write what reports say of encodings without torch: posbench/encodings/cards.json."""

import json

from posbench import encodings, listing


def written() -> str:
    """Return the text of the file: the card of each encoding at the demo's size."""
    cards = {name: listing.demo_card(name) for name in sorted(encodings.MODULE_OF)}
    lines = [f'  "{name}": {json.dumps(card)}' for name, card in cards.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    listing.CARDS.write_text(written(), encoding="utf-8")
