from hypothesis import given, settings
from tests.core.strategies import amounts, events

from pollux.core import codec
from pollux.scheduler import MemoryLog, Record, SavedState
from pollux.testing import StoreContract
from pollux.testing.stores import RECORDS


class TestMemoryLog(StoreContract):
    """Dies with its process: what another one would find is what somebody wrote down."""

    def make(self):
        return MemoryLog()

    def reopen(self, log):
        latest = log.latest()
        if latest is not None:
            latest = latest[0], codec.loads(codec.dumps(latest[1]), SavedState)
        return MemoryLog([codec.loads(codec.dumps(record), Record) for record in log.records()], latest)

    def test_it_knows_its_length(self):
        assert len(self.filled()) == len(RECORDS)

    def test_reading_is_not_disturbed_by_the_list_that_it_was_made_from(self):
        given = list(RECORDS)
        log = MemoryLog(given)
        given.clear()
        assert len(log) == len(RECORDS)


@settings(max_examples=60)
@given(amounts, events)
def test_every_record_survives_json(time_s, event):
    record = Record(time_s, event)
    text = codec.dumps(record)
    assert codec.loads(text, Record) == record
    assert codec.dumps(codec.loads(text)) == text
