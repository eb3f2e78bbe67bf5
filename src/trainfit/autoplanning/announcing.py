"""One line in the log says what was done, also where nobody has set up logging."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("trainfit")


def announce(text: str) -> None:
    """Write a line to the log of the name `trainfit`, at the level INFO.

    Where the program has not said what to do with logs it goes to standard error, as warnings would.
    """
    if LOGGER.level == logging.NOTSET and not LOGGER.hasHandlers():
        record = LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, text, (), None)
        if logging.lastResort is not None:
            logging.lastResort.emit(record)
        return
    LOGGER.info("%s", text)
