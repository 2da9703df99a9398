use super::*;

/// Removes parameters, by name. The next put continues their version numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropParameters(pub String);

call!(DropParameters: Operator => (), names: |drop, visit| visit(&mut drop.0), command: |drop, memory| {
    memory.parameters().remove(&drop.0);
    Ok(())
});
