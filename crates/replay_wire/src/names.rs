//! Conversions between enums of the schema and their Rust types. The matches are exhaustive in both directions, so a variant
//! that is missing on one side does not compile.

use super::innet_capnp as wire;
use gradients::Arithmetic;
use replay_core::error::ErrorCode;
use replay_core::schema::{Codec, Dtype, Sampler};

macro_rules! same_variants {
    ($name:ident: $($variant:ident)+) => {
        impl From<$name> for wire::$name {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => wire::$name::$variant,)+
                }
            }
        }

        impl From<wire::$name> for $name {
            fn from(value: wire::$name) -> Self {
                match value {
                    $(wire::$name::$variant => $name::$variant,)+
                }
            }
        }
    };
}

same_variants!(Dtype: Bool Uint8 Int8 Uint16 Int16 Uint32 Int32 Uint64 Int64 Float16 Float32 Float64);
same_variants!(Codec: None Lz4 Zstd);
same_variants!(Sampler: Prioritized Uniform Fifo Lifo MaxHeap MinHeap);
same_variants!(Arithmetic: Float Fixed);
same_variants!(ErrorCode:
    Internal Priority NoMass UnknownTable TableDiffers Table Schema TooLarge Deadline View Fenced Expired
    Protocol Version Authentication Connect Disconnected Corrupt Config Parameters Closed Io Interrupted
    Gradients);
