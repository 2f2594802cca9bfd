"""The master's core: all decisions, none of the doing.

In: events (`events.py`), one at a time. Out: commands (`commands.py`). Never: a socket, a clock, randomness, a wait, or
a decoded payload. The parts are wired together here; each says at its top what it is for.

The same core drives the real cluster, the fault tests (every interleaving of deliver, drop, duplicate, crash, restart)
and the workload simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from common.journal.records import Record
from joynexus.wire import ErrorCode, Failure, JoyNexusError, Message, back, failure, front, hosted
from services.master.acting import Acting
from services.master.arrivals import Arrivals
from services.master.backup import Backups
from services.master.budgets import Budgets
from services.master.catalog import Catalog
from services.master.commands import Command, Sources
from services.master.config import CoreConfig
from services.master.deletion import Deletions
from services.master.env_queue import EnvQueue
from services.master.events import (
    BackMessage,
    BlobServed,
    BlobStored,
    Event,
    FrontMessage,
    LimitsChanged,
    Persisted,
    PersistFailed,
    PricesChanged,
    Tick,
    Undeliverable,
)
from services.master.holdings import Holdings
from services.master.hosted import Hosts
from services.master.intake import Intake
from services.master.job import Tools
from services.master.jobs import Jobs
from services.master.lanes import Counters
from services.master.leases import Leases
from services.master.limits import Limits
from services.master.lives import METERED
from services.master.metering import Meter
from services.master.ops import Op
from services.master.outbox import Outbox
from services.master.outcomes import Outcomes
from services.master.policies import Policies
from services.master.policy import Policy
from services.master.protocol import Greetings
from services.master.reports import Counts, Reports
from services.master.restoring import Parts
from services.master.roster import Roster
from services.master.serving import Serving
from services.master.supervision import Supervision
from services.master.training import Training
from services.master.view import Views
from services.master.viewers import Viewers

Handler = Callable[[Any, Any], None]  # the event, and its message: of the type under which the handler is listed


class MessageFaultError(Exception):
    """A bug: handling one message raised what is this one's cause. `MasterCore.after_fault` goes on."""


class MasterCore:
    """All that the master decides.

    Args:
        config: numbers.
        new_id: gives ids that never repeat, not even after a restart (32 random hex digits, or a counter in tests).
        new_secret: gives words that nobody can guess, for those who look at the dashboard.
        sources: what may be read.
        now: time in seconds since the Unix epoch, by a clock that never jumps while the master runs.
        counts: gives what the shell refused or failed at so far, by kind, for operators to see.
        key_is_valid: tells whether a key (by its public half) has been neither revoked nor replaced.

    Attributes:
        views: makes pictures of the cluster.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        new_id: Callable[[], str],
        new_secret: Callable[[], str],
        sources: Sources,
        now: float,
        counts: Counts = dict,
        key_is_valid: Callable[[str], bool] = lambda key: True,
    ) -> None:
        self._config = config
        self._outbox = outbox = Outbox(new_id, config.retry_s)
        outbox.now = now
        acting, training, env = Counters(), Counters(), Counters()
        self._limits = Limits(config, (acting, training, env))
        self._greetings = Greetings(outbox, config, self._limits)
        self._holdings = Holdings(outbox, config, self._limits)
        self._roster = Roster(outbox, config)
        self._meter = Meter(outbox, self._holdings, config.usage_s)
        self._arrivals = Arrivals(outbox, self._holdings, self._meter)
        self._budgets = Budgets(outbox, self._meter, self._limits)
        self._roster.beaten = self._meter.lives.beat
        for role in METERED:
            self._roster.add_staff(role, self._meter.lives)
        self._policies = Policies(
            outbox,
            self._holdings,
            self._limits,
            lambda backbone: self._training.known_heads(backbone),
            lambda: self._training.backbones(),
        )
        self._backups = Backups(outbox)
        self._leases = Leases(outbox, self._policies, lambda policy: self._jobs.policy_freed(policy))
        self._env = EnvQueue(outbox, self._roster, config, env, self._meter)
        self._catalog = Catalog(outbox, config, self._holdings, self._env, sources.manifest, self._budgets.check)
        self._serving = Serving(outbox, self._roster, self._policies, config, self._meter)
        self._acting = Acting(
            outbox,
            config,
            self._roster,
            self._policies,
            self._serving,
            self._meter,
            self._limits,
            acting,
            self._env.task,
            self._budgets.check,
        )
        self._hosts = Hosts(outbox, config, self._env, self._acting.act_for, self._holdings.size)
        self._outcomes = Outcomes(outbox, config, self._policies, self._holdings, self._meter)
        self._training = Training(
            outbox,
            config,
            self._roster,
            self._policies,
            self._outcomes,
            lambda op: self._intake.payload(op, sources.payload),
            training,
            self._meter,
        )
        self._intake = Intake(
            outbox,
            config,
            self._policies,
            self._leases,
            self._catalog,
            self._holdings,
            self._meter,
            self._training,
            self._limits,
            self._budgets.check,
        )
        self._jobs = Jobs(self._tools)
        self._deletions = Deletions(outbox, self._policies, self._jobs, self._catalog, self._serving, self._training)
        self._viewers = Viewers(outbox, self._roster, new_secret, key_is_valid)
        self._supervision = Supervision(outbox, self._roster)
        self._reports = Reports(
            outbox,
            config.server,
            now,
            self._roster,
            self._policies,
            self._jobs,
            self._training,
            self._acting,
            self._env,
            self._serving,
            self._hosts,
            self._supervision,
            {"training": training, "inference": acting, "env": env},
            counts,
        )
        self.views = Views(
            outbox,
            self._roster,
            self._policies,
            self._jobs,
            self._training,
            self._acting,
            self._env,
            self._serving,
            self._meter,
            self._reports,
            self._viewers,
            self._supervision,
        )
        self._outcomes.finished = self._op_finished
        self._outcomes.published = self._serving.offer
        self._outcomes.covering = self._jobs.covering
        self._outcomes.covered = self._jobs.covered
        self._outcomes.arrived = self._jobs.op_arrived
        self._catalog.settled = self._jobs.dataset_settled
        self._budgets.changed = self._jobs.budget_changed
        self.views.money = self._budgets.state
        self._serving.settled = self._jobs.version_settled
        self._policies.gone = self._serving.withdraw
        self._front, self._back = self._tables()

    # What the shell calls

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in an event and return what is to be done, in order.

        Args:
            event: what happened.
            now: time, never less than before.

        Raises:
            MessageFaultError: over a bug that the message met.
        """
        self._outbox.now = now
        self._outbox.run_timers()
        match event:
            case FrontMessage():
                self._ask(self._front, event)
            case BackMessage():
                self._ask(self._back, event)
            case Persisted():
                self._outbox.persisted(event.token)
            case PersistFailed():
                self._outbox.persist_failed(event.token, event.reason)
            case LimitsChanged():
                self._limits.change(event.limits)
                self._budgets.look_at_all()
            case PricesChanged():
                self._meter.prices = event.prices.as_text() if event.prices else {}
                self._budgets.change_prices(event.prices)
            case Tick():
                self._acting.tick()
            case Undeliverable():
                self._roster.on_undeliverable(event)
            case BlobStored():
                self._arrivals.on_stored(event)
            case BlobServed():
                self._meter.on_served(event)
        return self._outbox.take()

    def after_fault(self, event: FrontMessage | BackMessage) -> list[Command]:
        """Go on after `handle` raised over a message: return what it had commanded until then.

        A worker that said it is taken for dead: whether its word counted, nobody knows, so what it had is done anew.
        """
        if isinstance(event, BackMessage):
            self._roster.dismiss(event, f"its '{event.header.kind}' met a bug of the master")
        return self._outbox.take()

    def restore(self, records: Iterable[Record]) -> list[Command]:
        """Take everything back from the journal, in the order in which it gives it; go on with what was under way.

        Limits and prices are told before, so that nobody who is over its budget begins anything.
        """
        parts = Parts(self._policies, self._leases, self._jobs, self._catalog, self._meter, self._holdings)
        for record in records:
            parts.restore(record)
        self._meter.resume()
        self._budgets.resume()
        for policy in self._policies.everywhere():
            self._training.ready(policy)
        self._catalog.resume()
        self._jobs.resume()
        return self._outbox.take()

    def next_deadline(self) -> float | None:
        """When to send a `Tick` at the latest; None if nothing waits for time."""
        due = [at for at in (self._outbox.next_timer(), self._acting.next_deadline()) if at is not None]
        return min(due, default=None)

    def may_read(self, tenant: str, digest: str) -> bool:
        """Tell whether a tenant may read this blob (and so need not upload it again)."""
        return self._holdings.may_read(tenant, digest)

    def refuse_upload(self, tenant: str, digest: str, nbytes: int) -> Failure | None:
        """Say why a tenant may not upload so much; None if it may."""
        return self._arrivals.refusal(tenant, digest, nbytes)

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        """Return those of these blobs to which nothing refers, of any tenant's; none while a backup is made."""
        return [] if self._backups.under_way else self._holdings.unreferenced(digests)

    # Inside

    def _ask(self, table: dict[type[Message], Handler], asked: FrontMessage | BackMessage) -> None:
        handler = table.get(type(asked.message))
        try:
            if handler is None:
                raise JoyNexusError(failure(ErrorCode.INVALID, f"'{asked.header.kind}' cannot be asked here"))
            self._greetings.check(asked)
            handler(asked, asked.message)
        except JoyNexusError as error:
            self._outbox.answer(asked, error.failure)
        except Exception as error:
            raise MessageFaultError(f"'{asked.header.kind}' met a bug: {error!r}") from error

    def _on_register(self, said: BackMessage, message: back.Register) -> None:
        self._roster.on_register(said, message)
        self._catalog.mounted_again(message.mounted)

    def _op_finished(self, policy: Policy, op: Op) -> None:
        self._intake.op_finished(policy)
        self._jobs.op_finished(policy, op)

    def _tools(self, jobs: Jobs) -> Tools:
        return Tools(
            outbox=self._outbox,
            config=self._config,
            policies=self._policies,
            catalog=self._catalog,
            holdings=self._holdings,
            intake=self._intake,
            training=self._training,
            serving=self._serving,
            acting=self._acting,
            env=self._env,
            meter=self._meter,
            over_budget=self._budgets.over,
            wait=jobs.wait,
            ended=jobs.note_ended,
            freed=jobs.policy_freed,
            find=jobs.find,
            earlier=jobs.earlier,
            make_stage=jobs.make_stage,
            begin_stage=jobs.begin_stage,
        )

    def _tables(self) -> tuple[dict[type[Message], Handler], dict[type[Message], Handler]]:
        """Who handles what, from tenants and from workers."""
        to_tenants: dict[type[Message], Handler] = {
            front.Hello: self._greetings.on_hello,
            front.Ping: self._greetings.on_ping,
            front.CreatePolicy: self._policies.on_create,
            front.GetPolicy: self._policies.on_get,
            front.ListPolicies: self._policies.on_list,
            front.GetVersion: self._policies.on_get_version,
            front.AcquireLease: self._leases.on_acquire,
            front.ReleaseLease: self._leases.on_release,
            front.ForwardBackward: self._intake.on_op,
            front.OptimStep: self._intake.on_op,
            front.Publish: self._intake.on_op,
            front.SaveState: self._intake.on_op,
            front.LoadState: self._intake.on_op,
            front.LoadWeights: self._intake.on_op,
            front.MovePolicy: self._training.moves.on_move,
            front.DrainWorker: self._supervision.on_drain,
            front.CancelJobs: self._jobs.on_cancel_all,
            front.BackupBegin: self._backups.on_begin,
            front.BackupEnd: self._backups.on_end,
            front.SubmitJob: self._jobs.on_submit,
            front.GetJob: self._jobs.on_get,
            front.CancelJob: self._jobs.on_cancel,
            front.ResumeJob: self._jobs.on_resume,
            front.ListJobs: self._jobs.on_list,
            front.Act: self._acting.on_act,
            hosted.OfferEnvironment: self._hosts.on_offer,
            hosted.PullWork: self._hosts.on_pull,
            hosted.HostAct: self._hosts.on_act,
            hosted.HostDone: self._hosts.on_done,
            hosted.WithdrawEnvironment: self._hosts.on_withdraw,
            front.DeletePolicy: self._deletions.on_policy,
            front.DeleteVersion: self._deletions.on_version,
            front.DeleteDataset: self._deletions.on_dataset,
            front.PushDataset: self._catalog.on_push,
            front.GetDataset: self._catalog.on_get,
            front.ListDatasets: self._catalog.on_list,
            front.Status: self._reports.on_status,
            front.GetUsage: self._meter.on_get,
            front.OpenDashboard: self._viewers.on_open,
        }
        to_workers: dict[type[Message], Handler] = {
            back.Register: self._on_register,
            back.Beat: self._roster.on_beat,
            back.Leaving: self._roster.on_leaving,
            back.Gone: self._roster.on_gone,
            back.TrainDone: self._training.on_done,
            back.SlotFailed: self._training.on_slot_failed,
            back.PredictDone: self._acting.on_done,
            back.WorkerAct: self._acting.on_worker_act,
            back.WeightsApplied: self._serving.on_applied,
            back.WeightsRefused: self._serving.on_refused,
            back.DatasetPrepared: self._env.on_answer,
            back.IndicesDrawn: self._env.on_answer,
            back.RolloutDone: self._env.on_answer,
            back.SimulatorDescribed: self._env.on_answer,
            back.ActionsEvaluated: self._env.on_answer,
            front.Status: self._reports.on_status,
            back.Supervised: self._supervision.on_supervised,
            back.ViewCluster: self.views.on_view,
            back.ViewJob: self.views.on_view_job,
            back.RedeemCode: self._viewers.on_redeem,
            back.CloseSession: self._viewers.on_close,
        }
        return to_tenants, to_workers
