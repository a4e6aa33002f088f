"""Readers of the probes that are asked in words, by plain loops over their text. Imports nothing of posbench.

A solver gets the text up to the answer and says the answer. A trivial reader gets the text up to one of the answers, as
a model does that is given the right ones before it, and says something that takes no solving.
"""

import re


def passkey(text):
    return re.findall(r'The key is "(\d)". Remember', text)[0]


def multi_key(text):
    asked = re.search(r'The number of (\w+) is "$', text)[1]
    return dict(re.findall(r'The number of (\w+) is "(\d)"\.', text))[asked]


def trivial_multi_key(text):
    return re.findall(r'The number of \w+ is "(\d)"\.', text)[-1]
