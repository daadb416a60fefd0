"""A page to read ``/openapi.json`` with: one file, nothing loaded from elsewhere."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>mlflow-llm</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
details{border:1px solid #ccc;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}code{font-family:ui-monospace,monospace}
.m{display:inline-block;min-width:3.2rem;font-weight:600}table{border-collapse:collapse;width:100%}
td,th{border-top:1px solid #ddd;padding:.25rem .5rem;text-align:left;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}details,td,th{border-color:#444}}
</style></head><body><h1>mlflow-llm</h1>
<p>The machine-readable document is <a href="openapi.json">openapi.json</a>.</p>
<main>Loading…</main><script>
const el=(tag,text,...kids)=>{const e=document.createElement(tag);if(text)e.textContent=text;
e.append(...kids);return e};
const kind=s=>s.enum?s.enum.map(v=>JSON.stringify(v)).join(" | "):
 [].concat(s.type||(s.anyOf||s.oneOf||[]).map(kind)).join(" | ");
fetch("openapi.json").then(r=>r.json()).then(doc=>{
 const main=document.querySelector("main");main.textContent="";
 const deref=s=>s.$ref?doc.components.schemas[s.$ref.split("/").pop()]:s;
 const tags={};
 for(const[path,ops]of Object.entries(doc.paths))
  for(const[m,op]of Object.entries(ops))(tags[op.tags[0]]??=[]).push([path,m,op]);
 for(const[tag,ops]of Object.entries(tags)){
  main.append(el("h2",tag));
  for(const[path,m,op]of ops){
   const d=el("details");const s=el("summary");const b=el("span",m.toUpperCase());b.className="m";
   s.append(b,el("code",path)," "+op.summary);d.append(s);
   const body=op.requestBody?.content["application/json"].schema;
   for(const ref of body?(body.oneOf||[body]):[]){
    const schema=deref(ref);const t=el("table");
    const must=schema.required||[];
    for(const[name,f]of Object.entries(schema.properties))t.append(el("tr","",
     el("td","",el("code",name+(must.includes(name)?" *":""))),el("td",kind(f)),el("td",f.description||"")));
    d.append(el("p",ref.$ref.split("/").pop()),t)}
   const r=el("table");
   for(const[code,v]of Object.entries(op.responses))r.append(el("tr","",el("td",code),el("td",v.description)));
   d.append(r);main.append(d)}}
});
</script></body></html>
"""
