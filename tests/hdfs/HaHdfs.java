import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.ha.HAServiceProtocol.RequestSource;
import org.apache.hadoop.ha.HAServiceProtocol.StateChangeRequestInfo;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.server.datanode.DataNode;
import org.apache.hadoop.hdfs.server.namenode.NameNode;
import org.apache.hadoop.metrics2.lib.DefaultMetricsSystem;

/**
 * Two real NameNodes, of which one is active, and N real DataNodes in one JVM, on loopback. The
 * NameNodes share their edits in a folder.
 *
 * <p>Arguments: HOME N BIND (unused) key=value..., which say where the NameNodes "0" and "1" of the
 * nameservice "pair" listen.
 *
 * <p>Prints "READY 0 0 dataPort...". Then obeys lines on standard input: "fail-over" (the active
 * NameNode becomes standby, and the other active), "kill" (the active one stops, and nobody else
 * does anything), "take-over" (the other one becomes active), "start" (the stopped one comes back as
 * standby), each answered with "OK" or "ERROR reason"; "quit" or the end of input ends the process.
 */
public class HaHdfs {
  private static final StateChangeRequestInfo ASKED =
      new StateChangeRequestInfo(RequestSource.REQUEST_BY_USER);

  private final String home;
  private final Configuration conf = new HdfsConfiguration();
  private final DataNode[] dataNodes;
  private final NameNode[] nameNodes = new NameNode[2];
  private int active;

  HaHdfs(String[] arguments) {
    home = arguments[0];
    dataNodes = new DataNode[Integer.parseInt(arguments[1])];
    conf.set("hadoop.tmp.dir", home + "/tmp");
    conf.set("dfs.namenode.shared.edits.dir", "file://" + home + "/edits");
    conf.set("dfs.ha.tail-edits.period", "1");
    conf.set("dfs.ha.standby.checkpoints", "false");
    for (int i = 3; i < arguments.length; i++) {
      int equals = arguments[i].indexOf('=');
      conf.set(arguments[i].substring(0, equals), arguments[i].substring(equals + 1));
    }
  }

  private Configuration of(int index) {
    Configuration own = new HdfsConfiguration(conf);
    own.set("dfs.nameservice.id", "pair");
    own.set("dfs.ha.namenode.id", "" + index);
    own.set("dfs.namenode.name.dir", "file://" + home + "/namenode" + index);
    return own;
  }

  private void startNameNodes() throws Exception {
    new File(home, "edits").mkdirs();
    NameNode.format(of(0));
    Path source = new File(home, "namenode0").toPath();
    Path target = new File(home, "namenode1").toPath();
    try (Stream<Path> paths = Files.walk(source)) { // what -bootstrapStandby fetches
      for (Path path : (Iterable<Path>) paths::iterator) {
        Files.copy(path, target.resolve(source.relativize(path)));
      }
    }
    for (int i = 0; i < nameNodes.length; i++) {
      nameNodes[i] = new NameNode(of(i));
    }
    nameNodes[active].getRpcServer().transitionToActive(ASKED);
  }

  private void startDataNode(int index) throws Exception {
    File folder = new File(home, "datanode" + index);
    folder.mkdirs();
    Configuration own = new HdfsConfiguration(conf);
    own.set("dfs.datanode.data.dir", "file://" + folder);
    own.set("dfs.datanode.data.dir.perm", "700");
    own.set("dfs.datanode.address", "127.0.0.1:0");
    own.set("dfs.datanode.http.address", "127.0.0.1:0");
    own.set("dfs.datanode.ipc.address", "127.0.0.1:0");
    own.set("dfs.datanode.hostname", "127.0.0.1");
    dataNodes[index] = DataNode.createDataNode(new String[0], own);
  }

  private void waitFor(NameNode nameNode) throws Exception {
    while (nameNode.isInSafeMode()
        || nameNode.getNamesystem().getNumLiveDataNodes() < dataNodes.length) {
      Thread.sleep(20);
    }
  }

  private void start() throws Exception {
    startNameNodes();
    StringBuilder ready = new StringBuilder("READY 0 0");
    for (int i = 0; i < dataNodes.length; i++) {
      startDataNode(i);
      ready.append(" ").append(dataNodes[i].getXferPort());
    }
    for (NameNode nameNode : nameNodes) {
      waitFor(nameNode);
    }
    say(ready.toString());
  }

  private void obey(String word) throws Exception {
    int other = 1 - active;
    switch (word) {
      case "fail-over":
        nameNodes[active].getRpcServer().transitionToStandby(ASKED);
        nameNodes[other].getRpcServer().transitionToActive(ASKED);
        active = other;
        break;
      case "kill":
        nameNodes[active].stop();
        nameNodes[active].join();
        break;
      case "take-over":
        nameNodes[other].getRpcServer().transitionToActive(ASKED);
        active = other;
        break;
      case "start":
        nameNodes[other] = new NameNode(of(other));
        waitFor(nameNodes[other]);
        break;
      default:
        throw new IllegalArgumentException("unknown command " + word);
    }
  }

  private static void say(String line) {
    System.out.println(line);
    System.out.flush();
  }

  public static void main(String[] arguments) throws Exception {
    DefaultMetricsSystem.setMiniClusterMode(true); // else the second DataNode's metrics clash
    try {
      HaHdfs hdfs = new HaHdfs(arguments);
      hdfs.start();
      BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
      String line;
      while ((line = input.readLine()) != null && !line.equals("quit")) {
        try {
          hdfs.obey(line.trim());
          say("OK");
        } catch (Exception error) {
          say("ERROR " + error);
        }
      }
    } finally {
      Runtime.getRuntime().halt(0); // an orderly shutdown of all servers takes many seconds
    }
  }
}
