//! Conversion of parameters between Python dictionaries of arrays and safetensors files.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use half::{bf16, f16};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};
use safetensors::tensor::{Dtype as FileDtype, SafeTensors, View};

use base::allocation;
use replay_core::schema::Dtype;
use replay_core::view::Buffer;

use crate::array::{self, Input};
use crate::error;

#[doc = stub_doc!("Parameters")]
#[pyclass(name = "Parameters", module = "innet_drl", frozen, get_all)]
pub struct PyParameters {
    #[doc = stub_doc!("Parameters.version")]
    version: u64,
    #[doc = stub_doc!("Parameters.tensors")]
    tensors: Py<PyDict>,
}

impl PyParameters {
    /// The tensors of a file: NumPy arrays, or torch tensors on `device`.
    pub fn new(py: Python<'_>, version: u64, contents: Contents, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Contents { stored, mut memory } = contents;
        // Moving the memory into its owner does not move the bytes, in either variant.
        let start = memory.as_mut_ptr();
        let owner = Bound::new(py, array::Owner::new(memory))?;
        let tensors = PyDict::new(py);
        for entry in stored {
            let Some(dtype) = python_dtype(entry.dtype) else {
                continue;
            };
            // SAFETY: `read` found the tensor's range within the memory, and at a multiple of its alignment;
            // `owner` holds the memory, and only arrays on it touch it from here on.
            let array = unsafe {
                let data = start.add(entry.range.start);
                array::over(owner.as_any(), data, dtype, &entry.shape, None, true)
            }?;
            let tensor = match device {
                None => array,
                Some(device) => array::torch_call(intern!(py, "tensor_on"), (array, device))?,
            };
            tensors.set_item(entry.name, tensor)?;
        }
        Ok(PyParameters { version, tensors: tensors.unbind() })
    }
}

#[pymethods]
impl PyParameters {
    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<Parameters version {}, {} tensors>", self.version, self.tensors.bind(py).len())
    }
}

/// A tensor to write to a file.
pub struct Tensor<'py> {
    name: String,
    dtype: FileDtype,
    array: Input<'py>,
    to_bfloat16: bool,
}

/// The contents of a tensor, which do not need the interpreter lock.
pub struct TensorView<'a> {
    dtype: FileDtype,
    shape: &'a [usize],
    bytes: &'a [u8],
    to_bfloat16: bool,
}

impl View for &TensorView<'_> {
    fn dtype(&self) -> FileDtype {
        if self.to_bfloat16 { FileDtype::BF16 } else { self.dtype }
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.bytes;
        if !self.to_bfloat16 {
            return Cow::Borrowed(bytes);
        }
        // Rounds to nearest, ties to even, as torch does.
        let narrow = |value: f32| bf16::from_f32(value).to_le_bytes();
        Cow::Owned(match self.dtype {
            FileDtype::F64 => narrowed(bytes, |b| narrow(f64::from_le_bytes(b) as f32)),
            FileDtype::F16 => narrowed(bytes, |b| narrow(f16::from_le_bytes(b).to_f32())),
            _ => narrowed(bytes, |b| narrow(f32::from_le_bytes(b))),
        })
    }

    fn data_len(&self) -> usize {
        if self.to_bfloat16 { 2 * self.shape.iter().product::<usize>() } else { self.bytes.len() }
    }
}

fn narrowed<const N: usize>(bytes: &[u8], narrow: impl Fn([u8; N]) -> [u8; 2]) -> Vec<u8> {
    bytes.as_chunks::<N>().0.iter().flat_map(|&value| narrow(value)).collect()
}

/// Takes the arrays or torch tensors of a mapping, without copying those that are contiguous and on the CPU.
pub fn collect<'py>(
    py: Python<'py>,
    name: &str,
    tensors: &Bound<'py, PyAny>,
    dtype: Option<&str>,
) -> PyResult<Vec<Tensor<'py>>> {
    let mapping = || {
        PyTypeError::new_err(format!(
            "tensors is a mapping of names to arrays or torch tensors, such as module.state_dict(), got {}",
            tensors.get_type()
        ))
    };
    let tensors = tensors.cast::<PyMapping>().map_err(|_| mapping())?;
    let to_bfloat16 = match dtype {
        None => false,
        Some("bfloat16") => true,
        Some(other) => {
            return Err(error::config(py, format!("dtype is None or \"bfloat16\", got {other:?}")));
        }
    };
    tensors
        .items()?
        .iter()
        .map(|item| {
            let (key, value): (String, Bound<'_, PyAny>) = item.extract().map_err(|_| mapping())?;
            let refuse = |reason| {
                let message = format!("parameters {name:?} were refused: tensor {key:?}: {reason}");
                error::raise(py, "ParametersError", message)
            };
            to_tensor(key.clone(), &value, to_bfloat16, refuse)
        })
        .collect()
}

fn to_tensor<'py>(
    name: String,
    value: &Bound<'py, PyAny>,
    to_bfloat16: bool,
    refuse: impl Fn(String) -> PyErr,
) -> PyResult<Tensor<'py>> {
    let py = value.py();
    let mut value = value.clone();
    let mut is_bfloat16 = false;
    if let Some(detach) = value.getattr_opt("detach")? {
        // A torch tensor. NumPy has no bfloat16, so its bits are read as int16.
        value = detach.call0()?.call_method0("cpu")?;
        if value.getattr("dtype")?.str()?.to_cow()? == "torch.bfloat16" {
            is_bfloat16 = true;
            let bits = py.import("torch")?.getattr("int16")?;
            value = value.call_method1("view", (bits,))?;
        }
    }
    let array = array::read(&value, None, refuse)?;
    let dtype = if is_bfloat16 { FileDtype::BF16 } else { file_dtype(array.dtype) };
    let float = matches!(dtype, FileDtype::F16 | FileDtype::F32 | FileDtype::F64);
    Ok(Tensor { name, dtype, array, to_bfloat16: to_bfloat16 && float })
}

/// The contents of tensors, by name.
pub fn views<'a>(tensors: &'a [Tensor<'_>]) -> HashMap<&'a str, TensorView<'a>> {
    let view = |tensor: &'a Tensor<'_>| TensorView {
        dtype: tensor.dtype,
        shape: &tensor.array.shape,
        bytes: tensor.array.bytes(),
        to_bfloat16: tensor.to_bfloat16,
    };
    let named = tensors.iter().map(|tensor| (tensor.name.as_str(), view(tensor)));
    named.collect()
}

/// Writes a safetensors file.
pub fn write(name: &str, tensors: &HashMap<&str, TensorView<'_>>) -> replay_core::Result<Bytes> {
    let bytes: u64 = tensors.values().map(|view| view.data_len() as u64).sum();
    allocation::check("a file of parameters", bytes)?;
    safetensors::serialize(tensors, None)
        .map(Bytes::from)
        .map_err(|error| replay_core::Error::Parameters { name: name.to_owned(), reason: error.to_string() })
}

/// The tensors of a file, in memory that belongs to the reader.
pub struct Contents {
    stored: Vec<StoredTensor>,
    memory: TensorMemory,
}

struct StoredTensor {
    name: String,
    dtype: FileDtype,
    shape: Vec<usize>,
    /// Its elements, in bytes from the start of the memory.
    range: Range<usize>,
}

enum TensorMemory {
    /// The received file itself.
    Received(BytesMut),
    /// A copy.
    Unpacked(Buffer),
}

impl TensorMemory {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            TensorMemory::Received(file) => file.as_mut_ptr(),
            TensorMemory::Unpacked(buffer) => buffer.as_mut_ptr(),
        }
    }
}

/// Reads a safetensors file; bfloat16, which NumPy does not have, becomes float32.
pub fn read(name: &str, file: Bytes) -> replay_core::Result<Contents> {
    let refuse = |reason: String| replay_core::Error::Parameters { name: name.to_owned(), reason };
    let parsed = SafeTensors::deserialize(&file).map_err(|error| refuse(error.to_string()))?;
    let tensors = parsed.iter().map(|(key, view)| {
        let dtype = view.dtype();
        if python_dtype(dtype).is_none() {
            return Err(refuse(format!("tensor {key:?} has elements of {dtype:?}, which NumPy does not have")));
        }
        let start = view.data().as_ptr().addr() - file.as_ptr().addr();
        Ok(StoredTensor {
            name: key.to_owned(),
            dtype,
            shape: view.shape().to_vec(),
            range: start..start + view.data().len(),
        })
    });
    let stored = tensors.collect::<replay_core::Result<Vec<_>>>()?;
    let usable = |entry: &StoredTensor| {
        let address = file.as_ptr().addr() + entry.range.start;
        let alignment = python_dtype(entry.dtype).map_or(1, Dtype::bytes);
        entry.dtype != FileDtype::BF16 && address.is_multiple_of(alignment)
    };
    if !stored.iter().all(usable) {
        return unpack(stored, &file);
    }
    // A file without other references needs no copy.
    Ok(match file.try_into_mut() {
        Ok(file) => Contents { stored, memory: TensorMemory::Received(file) },
        Err(shared) => unpack(stored, &shared)?,
    })
}

/// Copies tensors out of a file.
fn unpack(mut stored: Vec<StoredTensor>, file: &[u8]) -> replay_core::Result<Contents> {
    let widening = |entry: &StoredTensor| if entry.dtype == FileDtype::BF16 { 2 } else { 1 };
    let size = |entry: &StoredTensor| (widening(entry) * entry.range.len()).next_multiple_of(Buffer::ALIGNMENT);
    let mut buffer = Buffer::zeros(stored.iter().map(size).sum())?;
    let mut rest = buffer.as_mut_slice();
    let mut start = 0;
    for entry in &mut stored {
        let from = &file[entry.range.clone()];
        let len = widening(entry) * from.len();
        let (to, after) = std::mem::take(&mut rest).split_at_mut(size(entry));
        rest = after;
        if entry.dtype == FileDtype::BF16 {
            let values = from.as_chunks().0.iter().map(|&bits| bf16::from_le_bytes(bits).to_f32());
            for (to, value) in to.as_chunks_mut().0.iter_mut().zip(values) {
                *to = value.to_ne_bytes();
            }
        } else {
            to[..len].copy_from_slice(from);
        }
        entry.range = start..start + len;
        start += to.len();
    }
    Ok(Contents { stored, memory: TensorMemory::Unpacked(buffer) })
}

fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::Bool => FileDtype::BOOL,
        Dtype::Uint8 => FileDtype::U8,
        Dtype::Int8 => FileDtype::I8,
        Dtype::Uint16 => FileDtype::U16,
        Dtype::Int16 => FileDtype::I16,
        Dtype::Uint32 => FileDtype::U32,
        Dtype::Int32 => FileDtype::I32,
        Dtype::Uint64 => FileDtype::U64,
        Dtype::Int64 => FileDtype::I64,
        Dtype::Float16 => FileDtype::F16,
        Dtype::Float32 => FileDtype::F32,
        Dtype::Float64 => FileDtype::F64,
    }
}

fn python_dtype(dtype: FileDtype) -> Option<Dtype> {
    if dtype == FileDtype::BF16 {
        return Some(Dtype::Float32);
    }
    Dtype::ALL.iter().copied().find(|&known| file_dtype(known) == dtype)
}
