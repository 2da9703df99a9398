//! Structures of arrays: dictionaries and tuples, also nested, with a column for each part. The name of a column is the path to its part:
//! `observation/camera`, or `observation/0` in a tuple.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PyTuple};

/// The parts of a structure by name, in their order. Without parts it is one array.
#[derive(Default)]
pub struct Structure(Vec<(String, Structure)>);

impl Structure {
    /// The structure of all columns with these names.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut root = Structure::default();
        for name in names {
            name.split('/').fold(&mut root, |parent, part| parent.add(part));
        }
        root.order();
        root
    }

    /// Orders parts that are numbered from 0: ragged arrays of a batch follow the others.
    fn order(&mut self) {
        if (0..self.0.len()).all(|index| self.get(&index.to_string()).is_some()) {
            self.0.sort_by_key(|(part, _)| part.parse::<usize>().ok());
        }
        self.0.iter_mut().for_each(|(_, structure)| structure.order());
    }

    fn add(&mut self, part: &str) -> &mut Structure {
        let index = self.0.iter().position(|(known, _)| known == part);
        let index = index.unwrap_or_else(|| {
            self.0.push((part.to_owned(), Structure::default()));
            self.0.len() - 1
        });
        &mut self.0[index].1
    }

    /// The part of this name.
    pub fn get(&self, part: &str) -> Option<&Structure> {
        let mut parts = self.0.iter();
        parts.find(|(known, _)| known == part).map(|(_, structure)| structure)
    }

    /// Whether it is one array.
    pub fn is_array(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether its parts are numbered.
    fn is_tuple(&self) -> bool {
        let mut parts = self.0.iter().enumerate();
        !self.is_array() && parts.all(|(index, (part, _))| *part == index.to_string())
    }

    /// Calls `read` with the path and the value of each array. `refuse` makes the exception for a value of another structure.
    pub fn read<'py>(
        &self,
        path: &str,
        value: &Bound<'py, PyAny>,
        refuse: &impl Fn(String) -> PyErr,
        read: &mut impl FnMut(&str, &Bound<'py, PyAny>) -> PyResult<()>,
    ) -> PyResult<()> {
        if self.is_array() {
            return read(path, value);
        }
        let is_tuple = self.is_tuple();
        let mut named = None;
        if !is_tuple && is_sequence(value) {
            let parts = PyTuple::new(value.py(), self.0.iter().map(|(part, _)| part))?;
            named = Some(value.py().import("innet_drl.structures")?.call_method1("named_parts", (value, parts))?);
        }
        let value = named.as_ref().unwrap_or(value);
        let names = || {
            let names: Vec<_> = self.0.iter().map(|(part, _)| part.as_str()).collect();
            names.join(", ")
        };
        let size = match value.len() {
            Ok(size) if is_tuple && is_sequence(value) => size,
            Ok(size) if !is_tuple && value.cast::<PyMapping>().is_ok() => size,
            _ => {
                let kind = if is_tuple { "tuple" } else { "dictionary" };
                let got = value.get_type().name()?;
                return Err(refuse(format!("{path:?} is a {kind} with the parts {}, got one {got}", names())));
            }
        };
        for (index, (part, structure)) in self.0.iter().enumerate() {
            let found = match is_tuple {
                true => value.get_item(index),
                false => value.get_item(part),
            };
            let found =
                found.map_err(|_| refuse(format!("{path:?} has the parts {}, and {part:?} is missing", names())))?;
            structure.read(&format!("{path}/{part}"), &found, refuse, read)?;
        }
        if size > self.0.len() {
            let got = match is_tuple {
                true => format!("got {size}"),
                false => format!("got {}", value.call_method0("keys")?.str()?),
            };
            return Err(refuse(format!("{path:?} has the parts {}, {got}", names())));
        }
        Ok(())
    }

    /// The dictionary of all parts; `array` returns an array by its path.
    pub fn to_dict<'py>(
        &self,
        py: Python<'py>,
        path: &str,
        array: &impl Fn(&str) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (part, structure) in &self.0 {
            let path = match path {
                "" => part.clone(),
                path => format!("{path}/{part}"),
            };
            let value = match structure {
                structure if structure.is_array() => array(&path)?,
                structure => {
                    let parts = structure.to_dict(py, &path, array)?;
                    match structure.is_tuple() {
                        true => PyTuple::new(py, parts.values())?.into_any(),
                        false => parts.into_any(),
                    }
                }
            };
            dict.set_item(part, value)?;
        }
        Ok(dict)
    }
}

fn is_sequence(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>()
}
