//! Element types of columns.

use half::f16;
use serde::{Deserialize, Serialize};

/// Defines [`Dtype`] from a table: variant, name, Rust's type and its conversion to float64.
macro_rules! dtypes {
    ($($variant:ident $name:literal $type:ty => $to_f64:expr;)+) => {
        /// Element type of a column, in NumPy's names. A bool is one byte, 0 or 1.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Dtype {
            $($variant),+
        }

        impl Dtype {
            /// Size of one element in bytes.
            pub const fn bytes(self) -> usize {
                match self {
                    $(Dtype::$variant => size_of::<$type>()),+
                }
            }

            /// Whether elements are floats, which may be NaN or infinite.
            pub const fn is_float(self) -> bool {
                matches!(self, Dtype::Float16 | Dtype::Float32 | Dtype::Float64)
            }

            /// Reads one element, little endian, as the nearest float64.
            ///
            /// # Panics
            /// When `element` has another size than [`Self::bytes`].
            pub fn read(self, element: &[u8]) -> f64 {
                const SIZE: &str = "the size of the type";
                match self {
                    $(Dtype::$variant => {
                        $to_f64(<$type>::from_le_bytes(element.try_into().expect(SIZE)))
                    })+
                }
            }

            /// NumPy's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => $name),+
                }
            }
        }
    };
}

dtypes! {
    Bool "bool" u8 => |byte| f64::from(u8::from(byte != 0));
    Uint8 "uint8" u8 => f64::from;
    Int8 "int8" i8 => f64::from;
    Uint16 "uint16" u16 => f64::from;
    Int16 "int16" i16 => f64::from;
    Uint32 "uint32" u32 => f64::from;
    Int32 "int32" i32 => f64::from;
    Uint64 "uint64" u64 => |integer: u64| integer as f64;
    Int64 "int64" i64 => |integer: i64| integer as f64;
    Float16 "float16" f16 => f16::to_f64;
    Float32 "float32" f32 => f64::from;
    Float64 "float64" f64 => |number| number;
}
