//! Prints the CustomResourceDefinition as YAML; `make generate` writes it to `crds/`.

fn main() {
    let definition = psjobs_api::crd::definition();
    println!("# Generated from api/src/crd by `make generate`; do not edit.");
    print!("{}", serde_yaml::to_string(&definition).expect("a definition is YAML"));
}
