"""A policy whose CPU and worker decodes go at their own pace whenever the device has anything else to do."""

from dataclasses import replace

from neo_desktop.engine.predict.estimate import joined
from neo_desktop.engine.schedule.draft import Draft
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.split import Outlook, Split


class OwnPace(Policy):
    """No prediction is asked; now and then, by the number of those who wait, nobody is taken along."""

    def divide(self, draft: Draft) -> Split:
        """Let all go at their own pace."""
        outlook = Outlook(draft.cost, draft.load, draft.queue, draft.moved_tokens)
        waiting = draft.queue.decodes(range(len(draft.queue)))
        counts = {place: requests for place, (requests, _) in joined(draft.staggered, waiting).items()}
        if not draft.load.tokens or not counts:
            return outlook.together()
        if draft.num_waiting % 3 == 2:
            return outlook.front(0, len(draft.queue) // 2)
        return replace(outlook.front(0, 0), staggered=counts)
