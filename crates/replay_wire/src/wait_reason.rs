//! Reasons of waits, which replies of any request may have.

use pastey::paste;

use crate::error::Result;
use crate::fields::{Field, Message, Rest, read, unknown};
use crate::innet_capnp as wire;
use replay_core::cause::{Cause, OutdatedWriter, TableWait, WaitReason};

/// Causes by name, with their numbers.
macro_rules! same_causes {
    ($($cause:ident { $($number:ident),+ })+; $($plain:ident)+) => { paste! {
        fn read_cause(from: wire::table_wait::cause::Reader<'_>) -> Result<Cause> {
            use wire::table_wait::cause::Which;
            Ok(match from.which().map_err(unknown)? {
                $(Which::$cause(from) => Cause::$cause {
                    $($number: from.[<get_ $number>]()),+
                },)+
                $(Which::$plain(()) => Cause::$plain,)+
            })
        }

        fn write_cause(cause: Cause, mut out: wire::table_wait::cause::Builder<'_>) {
            match cause {
                $(Cause::$cause { $($number),+ } => {
                    let mut out = out.[<init_ $cause:snake>]();
                    $(out.[<set_ $number>]($number);)+
                })+
                $(Cause::$plain => out.[<set_ $plain:snake>](()),)+
            }
        }
    }};
}

same_causes! {
    MinSize { live, min_size }
    Inserts { sampled, inserted, wanted, missing, samples_per_insert, slack }
    SamplesLeft { left, wanted, max_times_sampled }
    Items { found, wanted }
    Samples { sampled, inserted, missing, samples_per_insert, slack }
    PinnedBytes { pinned, missing, capacity_bytes };
    Emptied PinnedChunks LastItems
}

same_fields! {
    outdated_writer: OutdatedWriter { table, writer, parameters, version, newest, max_version_lag }
}

impl Message for TableWait {
    type Struct = wire::table_wait::Owned;

    fn read(from: wire::table_wait::Reader<'_>, _rest: &Rest) -> Result<Self> {
        Ok(TableWait {
            table: Field::read(from.get_table())?,
            cause: read_cause(from.get_cause())?,
            ahead: from.get_ahead(),
            steps_without_items: from.get_steps_without_items(),
        })
    }

    fn write(&self, mut out: wire::table_wait::Builder<'_>) -> Result<()> {
        out.set_table(&self.table);
        out.set_ahead(self.ahead);
        out.set_steps_without_items(self.steps_without_items);
        write_cause(self.cause, out.init_cause());
        Ok(())
    }
}

impl Message for WaitReason {
    type Struct = wire::wait_reason::Owned;

    fn read(from: wire::wait_reason::Reader<'_>, rest: &Rest) -> Result<Self> {
        use wire::wait_reason::Which;
        Ok(match from.which().map_err(unknown)? {
            Which::Table(wait) => WaitReason::Table(read(wait, rest)?),
            Which::Outdated(wait) => WaitReason::Outdated(read(wait, rest)?),
            Which::Ahead(calls) => WaitReason::Ahead(calls),
            Which::OwnReplies(bytes) => WaitReason::OwnReplies(bytes),
            Which::RoleReplies(bytes) => WaitReason::RoleReplies(bytes),
            Which::Answers(requests) => WaitReason::Answers(requests),
            Which::ReceiveMemory(()) => WaitReason::ReceiveMemory,
            Which::Other(sentence) => WaitReason::Other(Field::read(sentence)?),
        })
    }

    fn write(&self, mut out: wire::wait_reason::Builder<'_>) -> Result<()> {
        match self {
            WaitReason::Table(wait) => wait.write(out.init_table())?,
            WaitReason::Outdated(wait) => wait.write(out.init_outdated())?,
            WaitReason::Ahead(calls) => out.set_ahead(*calls),
            WaitReason::OwnReplies(bytes) => out.set_own_replies(*bytes),
            WaitReason::RoleReplies(bytes) => out.set_role_replies(*bytes),
            WaitReason::Answers(requests) => out.set_answers(*requests),
            WaitReason::ReceiveMemory => out.set_receive_memory(()),
            WaitReason::Other(sentence) | WaitReason::ForWriters(_, sentence) => out.set_other(sentence),
            // Only clients make this reason.
            WaitReason::AtServer(..) => out.set_other(self.to_string()),
        }
        Ok(())
    }
}
